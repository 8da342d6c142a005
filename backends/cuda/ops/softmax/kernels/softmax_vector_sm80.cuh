// Rows kept in registers, one warp or one block (a "team") a row, read once in 16-byte vectors.
// Many small blocks hide each other's reductions (measured faster than asking for the next row
// early). For n a multiple of the vector.
#pragma once

#include "_shim/device_shim.cuh"
#include "softmax/kernels/softmax_args.hpp"

namespace rm::cuda_ops {

template <class T, bool kLog, bool kWarp, int kPer>
__global__ void __launch_bounds__(kWarp ? 128 : 512) softmax_forward_vector(const SoftmaxArgs p) {
  constexpr int V = kVec<T>, kTeam = kWarp ? 32 : 1024;
  const int teams = kWarp ? blockDim.x / 32 : 1, threads = kWarp ? 32 : blockDim.x;
  const int thread = threadIdx.x % threads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * teams;
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * teams + threadIdx.x / threads;
       row < p.rows; row += step) {
    Pack<T, V> x[kPer];
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (thread + k * threads) * V;
      const T* source = static_cast<const T*>(p.x) + row * p.x_pitch + i;
      if (i < p.n) x[k] = *reinterpret_cast<const Pack<T, V>*>(source);
    }
    float top = Max::kIdentity;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      if ((thread + k * threads) * V >= p.n) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) top = Max{}(top, to_float(x[k].v[j]));
      forget_values(x[k]);
    }
    top = team_reduce<Max, kTeam>(top);
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      if ((thread + k * threads) * V >= p.n) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) total += __expf(to_float(x[k].v[j]) - top);
      forget_values(x[k]);
    }
    total = team_reduce<Sum, kTeam>(total);
    const float scale = kLog ? logf(total) : 1.0f / total;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (thread + k * threads) * V;
      if (i >= p.n) continue;
      float v[V];
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float d = to_float(x[k].v[j]) - top;
        v[j] = kLog ? d - scale : __expf(d) * scale;
      }
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
  for (std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * teams + threadIdx.x / threads;
       row < p.rows; row += step) {
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
