// Rows kept in registers: a warp or a block (a "team") takes rows in turn and reads each once in
// 16-byte vectors. Many small blocks hide each other's reductions (measured faster than asking for
// the next row early). For n a multiple of the vector.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/launch_shim.hpp"
#include "norm/kernels/norm_args.hpp"

namespace rm::cuda_ops {

/// The threads that share a row, and which rows they take.
template <bool kWarp>
struct Team {
  int thread, threads;
  std::int64_t first, step;
  __device__ Team() {
    if constexpr (kWarp) {
      const int warps = blockDim.x / 32;
      thread = threadIdx.x % 32, threads = 32;
      first = static_cast<std::int64_t>(blockIdx.x) * warps + threadIdx.x / 32;
      step = static_cast<std::int64_t>(gridDim.x) * warps;
    } else {
      thread = threadIdx.x, threads = blockDim.x;
      first = blockIdx.x, step = gridDim.x;
    }
  }
  __device__ float sum(float x) const { return team_reduce < Sum, kWarp ? 32 : 1024 > (x); }
};

template <class T, int kPer>
struct RowPacks {
  Pack<T, kVec<T>> v[kPer];
  __device__ void load(const void* base, std::int64_t offset, int thread, int threads, int n) {
    const T* row = static_cast<const T*>(base) + offset;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (thread + k * threads) * kVec<T>;
      if (i < n) v[k] = *reinterpret_cast<const Pack<T, kVec<T>>*>(row + i);
    }
  }
};

/// The row of a weight or bias, or `missing` where there is none.
template <class T, int V>
__device__ __forceinline__ void load_or(const void* base, int i, float missing, float (&out)[V]) {
  if (base) return load_vec(static_cast<const T*>(base) + i, out);
#pragma unroll
  for (int j = 0; j < V; ++j) out[j] = missing;
}

template <class T, bool kRms, bool kResidual, bool kWarp, int kPer>
__global__ void __launch_bounds__(kWarp ? 128 : 512) norm_forward_vector(const NormForwardArgs p) {
  constexpr int V = kVec<T>;
  const Team<kWarp> team;
  if (team.thread == 0 && team.first < p.rows) {
    const std::int64_t bytes = p.n * std::int64_t{sizeof(T)};
    overlap_ask(static_cast<const T*>(p.x) + team.first * p.x_pitch, bytes);
    if constexpr (kResidual) {
      overlap_ask(static_cast<const T*>(p.residual) + team.first * p.residual_pitch, bytes);
    }
  }
  overlap_begin(p.x, p.y, p.weight);
  const float inv_n = 1.0f / static_cast<float>(p.n);
  for (std::int64_t row = team.first; row < p.rows; row += team.step) {
    RowPacks<T, kPer> x, r;
    x.load(p.x, row * p.x_pitch, team.thread, team.threads, p.n);
    if constexpr (kResidual)
      r.load(p.residual, row * p.residual_pitch, team.thread, team.threads, p.n);
    const auto value = [&](int k, int j) {
      if constexpr (kResidual) return to_float(x.v[k].v[j]) + to_float(r.v[k].v[j]);
      return to_float(x.v[k].v[j]);
    };
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (team.thread + k * team.threads) * V;
      if (i >= p.n) continue;
      float h[V];
#pragma unroll
      for (int j = 0; j < V; ++j) {
        h[j] = value(k, j);
        total += kRms ? h[j] * h[j] : h[j];
      }
      if (p.sum) store_vec(static_cast<T*>(p.sum) + row * p.sum_pitch + i, h);
      forget_values(x.v[k]);
    }
    total = team.sum(total) * inv_n;
    const float mean = kRms ? 0.0f : total;
    if constexpr (!kRms) {
      total = 0.0f;
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        if ((team.thread + k * team.threads) * V >= p.n) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float d = value(k, j) - mean;
          total += d * d;
        }
        forget_values(x.v[k]);
      }
      total = team.sum(total) * inv_n;
    }
    const float rstd = rsqrtf(total + p.eps);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (team.thread + k * team.threads) * V;
      if (i >= p.n) continue;
      float y[V], w[V], b[V];
      load_or<T>(p.weight, i, 1.0f - p.weight_offset, w);
      load_or<T>(p.bias, i, 0.0f, b);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        y[j] = (value(k, j) - mean) * rstd * (w[j] + p.weight_offset) + b[j];
      }
      store_vec(static_cast<T*>(p.y) + row * p.y_pitch + i, y);
    }
  }
}

/// dx of each row; each block's share of dweight and dbias goes to its own row of p.partial.
template <class T, bool kRms, int kPer>
__global__ void __launch_bounds__(512) norm_backward_vector(const NormBackwardArgs p) {
  constexpr int V = kVec<T>;
  overlap_begin(p.h, p.dx, p.weight);
  const Team<false> team;
  float dw[kPer][V] = {}, db[kPer][V] = {};
  const float inv_n = 1.0f / static_cast<float>(p.n);
  for (std::int64_t row = team.first; row < p.rows; row += team.step) {
    RowPacks<T, kPer> h, dy;
    h.load(p.h, row * p.h_pitch, team.thread, team.threads, p.n);
    dy.load(p.dy, row * p.dy_pitch, team.thread, team.threads, p.n);
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      if ((team.thread + k * team.threads) * V >= p.n) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float x = to_float(h.v[k].v[j]);
        total += kRms ? x * x : x;
      }
      forget_values(h.v[k]);
    }
    total = team.sum(total) * inv_n;
    const float mean = kRms ? 0.0f : total;
    if constexpr (!kRms) {
      total = 0.0f;
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        if ((team.thread + k * team.threads) * V >= p.n) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float d = to_float(h.v[k].v[j]) - mean;
          total += d * d;
        }
        forget_values(h.v[k]);
      }
      total = team.sum(total) * inv_n;
    }
    const float rstd = rsqrtf(total + p.eps);
    float sum_g = 0.0f, sum_gx = 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (team.thread + k * team.threads) * V;
      if (i >= p.n) continue;
      float w[V];
      load_or<T>(p.weight, i, 1.0f - p.weight_offset, w);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float x = (to_float(h.v[k].v[j]) - mean) * rstd, d = to_float(dy.v[k].v[j]);
        const float g = d * (w[j] + p.weight_offset);
        dw[k][j] += d * x;
        db[k][j] += d;
        sum_g += g;
        sum_gx += g * x;
      }
      forget_values(h.v[k]);
      forget_values(dy.v[k]);
    }
    if constexpr (!kRms) sum_g = team.sum(sum_g) * inv_n;
    sum_gx = team.sum(sum_gx) * inv_n;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (team.thread + k * team.threads) * V;
      if (i >= p.n) continue;
      float out[V] = {}, w[V];
      if (p.dsum) load_vec(static_cast<const T*>(p.dsum) + row * p.dsum_pitch + i, out);
      load_or<T>(p.weight, i, 1.0f - p.weight_offset, w);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float x = (to_float(h.v[k].v[j]) - mean) * rstd, d = to_float(dy.v[k].v[j]);
        const float g = d * (w[j] + p.weight_offset);
        out[j] += rstd * (g - (kRms ? 0.0f : sum_g) - x * sum_gx);
      }
      store_vec(static_cast<T*>(p.dx) + row * p.dx_pitch + i, out);
    }
  }
  if (p.partial == nullptr) return;
  float* mine = p.partial + blockIdx.x * 2 * static_cast<std::int64_t>(p.n);
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const int i = (team.thread + k * team.threads) * V;
    if (i >= p.n) continue;
#pragma unroll
    for (int j = 0; j < V; ++j) mine[i + j] = dw[k][j], mine[p.n + i + j] = db[k][j];
  }
}

/// dweight and dbias from the blocks' shares, in a fixed order. Blocks of 32 columns x 32 lanes.
template <class T>
__global__ void __launch_bounds__(1024) norm_columns_vector(const NormBackwardArgs p, int shares) {
  __shared__ float part[2][32][33];
  overlap_begin(p.partial, p.dweight);  // the shares' kernel has ended
  const int column = blockIdx.x * 32 + threadIdx.x;
  float dw = 0.0f, db = 0.0f;
  if (column < p.n) {
    const std::int64_t pitch = 2 * static_cast<std::int64_t>(p.n);
#pragma unroll 4
    for (int t = threadIdx.y; t < shares; t += 32) {
      dw += p.partial[t * pitch + column];
      if (p.dbias) db += p.partial[t * pitch + p.n + column];
    }
  }
  part[0][threadIdx.y][threadIdx.x] = dw;
  part[1][threadIdx.y][threadIdx.x] = db;
  __syncthreads();
  if (p.n % 32 == 0 && threadIdx.x < 2) {  // whole lines that nobody reads again: not to memory
    for (int t = threadIdx.y; t < shares; t += 32) {
      const float* line = p.partial + (2 * static_cast<std::int64_t>(t) + threadIdx.x) * p.n;
      asm volatile("discard.global.L2 [%0], 128;" ::"l"(line + blockIdx.x * 32) : "memory");
    }
  }
  dw = warp_reduce<Sum>(part[0][threadIdx.x][threadIdx.y]);  // a warp adds one column's lanes
  db = warp_reduce<Sum>(part[1][threadIdx.x][threadIdx.y]);
  const int mine = blockIdx.x * 32 + threadIdx.y;
  if (threadIdx.x != 0 || mine >= p.n) return;
  if (p.dweight) static_cast<T*>(p.dweight)[mine] = from_float<T>(dw);
  if (p.dbias) static_cast<T*>(p.dbias)[mine] = from_float<T>(db);
}

}  // namespace rm::cuda_ops
