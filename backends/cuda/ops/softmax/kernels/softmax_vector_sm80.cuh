// Rows kept in registers, one warp or one block (a "team") a row, read once in 16-byte vectors.
// Many small blocks hide each other's reductions (measured faster than asking for the next row
// early). For n a multiple of the vector.
#pragma once

#include "_shim/launch_shim.hpp"
#include "_shim/row_shim.cuh"
#include "softmax/kernels/softmax_args.hpp"

namespace rm::cuda_ops {

__device__ __forceinline__ float softmax_exp(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504088896f));
  return y;
}

/// Exponentials are taken once, over the warp's maximum; the warps of a block meet once and bring
/// theirs to the row's maximum by a factor.
template <class T, bool kLog, bool kWarp, int kPer>
__global__ void __launch_bounds__(kWarp ? 128 : 512) softmax_forward_vector(const SoftmaxArgs p) {
  constexpr int V = kVec<T>;
  __shared__ float2 shares[2][32];  // of warps: maximum, sum; rows alternate, so one barrier does
  int slot = 0;
  const int teams = kWarp ? blockDim.x / 32 : 1, threads = kWarp ? 32 : blockDim.x;
  const int thread = threadIdx.x % threads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * teams;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * teams + threadIdx.x / threads;
  if (thread == 0 && first < p.rows) {
    overlap_ask(static_cast<const T*>(p.x) + first * p.x_pitch, p.n * std::int64_t{sizeof(T)});
  }
  overlap_begin(p.x, p.out);
  for (std::int64_t row = first; row < p.rows; row += step) {
    RowWords<T, kPer> x;
    x.load(p.x, row * p.x_pitch, thread, threads, p.n);
    float e[kPer][V], top = Max::kIdentity, total = 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const bool inside = (thread + k * threads) * V < p.n;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        e[k][j] = inside ? x.value(k, j) : Max::kIdentity;
        top = Max{}(top, e[k][j]);
      }
    }
    top = warp_reduce<Max>(top);
    const float base = top == Max::kIdentity ? 0.0f : top;  // a warp of -inf alone adds nothing
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float d = e[k][j] - base, power = softmax_exp(d);
        e[k][j] = kLog ? d : power;
        total += power;
      }
    }
    total = warp_reduce<Sum>(total);
    float factor = top == Max::kIdentity ? __int_as_float(0x7fc00000) : 1.0f, shift = 0.0f;
    if (!kWarp && blockDim.x > 32) {
      const int warps = blockDim.x / 32;
      float2* all = shares[slot];
      slot ^= 1;
      if (threadIdx.x % 32 == 0) all[threadIdx.x / 32] = float2{top, total};
      __syncthreads();
      float most = Max::kIdentity;
      for (int w = 0; w < warps; ++w) most = Max{}(most, all[w].x);
      total = 0.0f;
      for (int w = 0; w < warps; ++w) total += all[w].y * softmax_exp(all[w].x - most);
      factor = softmax_exp(top - most);  // 0 for a warp of -inf, NaN where the row is -inf
      shift = base - most;
    } else if (top == Max::kIdentity) {
      shift = factor;
    }
    const float scale = kLog ? shift - logf(total) : factor / total;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (thread + k * threads) * V;
      if (i >= p.n) continue;
      float v[V];
#pragma unroll
      for (int j = 0; j < V; ++j) v[j] = kLog ? e[k][j] + scale : e[k][j] * scale;
      store_vec(static_cast<T*>(p.out) + row * p.out_pitch + i, v);
    }
  }
}

template <class T, bool kLog, bool kWarp, int kPer>
__global__ void __launch_bounds__(kWarp ? 128 : 512) softmax_backward_vector(const SoftmaxArgs p) {
  constexpr int V = kVec<T>, kTeam = kWarp ? 32 : 1024;
  const int teams = kWarp ? blockDim.x / 32 : 1, threads = kWarp ? 32 : blockDim.x;
  const int thread = threadIdx.x % threads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * teams;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * teams + threadIdx.x / threads;
  if (thread == 0 && first < p.rows) {
    const std::int64_t bytes = p.n * std::int64_t{sizeof(T)};
    overlap_ask(static_cast<const T*>(p.x) + first * p.x_pitch, bytes);
    overlap_ask(static_cast<const T*>(p.dy) + first * p.dy_pitch, bytes);
  }
  overlap_begin(p.x, p.out);
  for (std::int64_t row = first; row < p.rows; row += step) {
    float y[kPer][V], d[kPer][V];
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (thread + k * threads) * V;
      if (i >= p.n) continue;
      load_vec(static_cast<const T*>(p.x) + row * p.x_pitch + i, y[k]);
      load_vec(static_cast<const T*>(p.dy) + row * p.dy_pitch + i, d[k]);
    }
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      if ((thread + k * threads) * V >= p.n) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) total += kLog ? d[k][j] : d[k][j] * y[k][j];
    }
    total = team_reduce<Sum, kTeam>(total);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (thread + k * threads) * V;
      if (i >= p.n) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        y[k][j] = kLog ? d[k][j] - __expf(y[k][j]) * total : y[k][j] * (d[k][j] - total);
      }
      store_vec(static_cast<T*>(p.out) + row * p.out_pitch + i, y[k]);
    }
  }
}

}  // namespace rm::cuda_ops
