// Rows kept in registers: a warp or a block (a "team") takes rows in turn, reads each once in 16-byte
// vectors and asks for the next row before it reduces this one. For n a multiple of the vector.
#pragma once

#include "_shim/device_shim.cuh"
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
  __device__ float sum(float x) const { return team_reduce<Sum, kWarp ? 32 : 1024>(x); }
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

template <class T, bool kRms, bool kWarp, int kPer>
__global__ void __launch_bounds__(kWarp ? 128 : 512) norm_forward_vector(const NormForwardArgs p) {
  constexpr int V = kVec<T>;
  const Team<kWarp> team;
  RowPacks<T, kPer> x, r, w, b;
  if (p.weight) w.load(p.weight, 0, team.thread, team.threads, p.n);
  if (p.bias) b.load(p.bias, 0, team.thread, team.threads, p.n);
  std::int64_t row = team.first;
  if (row < p.rows) {
    x.load(p.x, row * p.x_pitch, team.thread, team.threads, p.n);
    if (p.residual) r.load(p.residual, row * p.residual_pitch, team.thread, team.threads, p.n);
  }
  const float inv_n = 1.0f / static_cast<float>(p.n);
  for (; row < p.rows; row += team.step) {
    float v[kPer][V];
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const bool inside = (team.thread + k * team.threads) * V < p.n;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        v[k][j] = inside ? to_float(x.v[k].v[j]) : 0.0f;
        if (inside && p.residual) v[k][j] += to_float(r.v[k].v[j]);
        total += kRms ? v[k][j] * v[k][j] : v[k][j];
      }
      if (inside && p.sum) {
        store_vec(static_cast<T*>(p.sum) + row * p.sum_pitch + (team.thread + k * team.threads) * V,
                  v[k]);
      }
    }
    const std::int64_t next = row + team.step;
    if (next < p.rows) {
      x.load(p.x, next * p.x_pitch, team.thread, team.threads, p.n);
      if (p.residual) r.load(p.residual, next * p.residual_pitch, team.thread, team.threads, p.n);
    }
    total = team.sum(total) * inv_n;
    float mean = 0.0f, square = total;
    if constexpr (!kRms) {
      mean = total;
      square = 0.0f;
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        if ((team.thread + k * team.threads) * V >= p.n) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) square += (v[k][j] - mean) * (v[k][j] - mean);
      }
      square = team.sum(square) * inv_n;
    }
    const float rstd = rsqrtf(square + p.eps);
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (team.thread + k * team.threads) * V;
      if (i >= p.n) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        v[k][j] = (v[k][j] - mean) * rstd;
        if (p.weight) v[k][j] *= to_float(w.v[k].v[j]) + p.weight_offset;
        if (p.bias) v[k][j] += to_float(b.v[k].v[j]);
      }
      store_vec(static_cast<T*>(p.y) + row * p.y_pitch + i, v[k]);
    }
  }
}

/// dx of each row; each team's share of dweight and dbias goes to its own row of p.partial.
template <class T, bool kRms, bool kWarp, int kPer>
__global__ void __launch_bounds__(kWarp ? 128 : 512) norm_backward_vector(const NormBackwardArgs p) {
  constexpr int V = kVec<T>;
  const Team<kWarp> team;
  RowPacks<T, kPer> w;
  if (p.weight) w.load(p.weight, 0, team.thread, team.threads, p.n);
  float dw[kPer][V] = {}, db[kPer][V] = {};
  const float inv_n = 1.0f / static_cast<float>(p.n);
  for (std::int64_t row = team.first; row < p.rows; row += team.step) {
    RowPacks<T, kPer> h, dy;
    h.load(p.h, row * p.h_pitch, team.thread, team.threads, p.n);
    dy.load(p.dy, row * p.dy_pitch, team.thread, team.threads, p.n);
    float v[kPer][V];
    float total = 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const bool inside = (team.thread + k * team.threads) * V < p.n;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        v[k][j] = inside ? to_float(h.v[k].v[j]) : 0.0f;
        total += kRms ? v[k][j] * v[k][j] : v[k][j];
      }
    }
    total = team.sum(total) * inv_n;
    float mean = 0.0f, square = total;
    if constexpr (!kRms) {
      mean = total;
      square = 0.0f;
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        if ((team.thread + k * team.threads) * V >= p.n) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) square += (v[k][j] - mean) * (v[k][j] - mean);
      }
      square = team.sum(square) * inv_n;
    }
    const float rstd = rsqrtf(square + p.eps);
    float sum_g = 0.0f, sum_gx = 0.0f;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      if ((team.thread + k * team.threads) * V >= p.n) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        v[k][j] = (v[k][j] - mean) * rstd;
        const float d = to_float(dy.v[k].v[j]);
        const float g = p.weight ? d * (to_float(w.v[k].v[j]) + p.weight_offset) : d;
        dw[k][j] += d * v[k][j];
        db[k][j] += d;
        sum_g += g;
        sum_gx += g * v[k][j];
      }
    }
    if constexpr (!kRms) sum_g = team.sum(sum_g) * inv_n;
    sum_gx = team.sum(sum_gx) * inv_n;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (team.thread + k * team.threads) * V;
      if (i >= p.n) continue;
      float extra[V] = {};
      if (p.dsum) load_vec(static_cast<const T*>(p.dsum) + row * p.dsum_pitch + i, extra);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float d = to_float(dy.v[k].v[j]);
        const float g = p.weight ? d * (to_float(w.v[k].v[j]) + p.weight_offset) : d;
        v[k][j] = rstd * (g - (kRms ? 0.0f : sum_g) - v[k][j] * sum_gx) + extra[j];
      }
      store_vec(static_cast<T*>(p.dx) + row * p.dx_pitch + i, v[k]);
    }
  }
  if (p.partial == nullptr) return;
  float* mine = p.partial + team.first * 2 * p.n;
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const int i = (team.thread + k * team.threads) * V;
    if (i >= p.n) continue;
#pragma unroll
    for (int j = 0; j < V; ++j) mine[i + j] = dw[k][j], mine[p.n + i + j] = db[k][j];
  }
}

/// dweight and dbias from the teams' shares, in a fixed order. Blocks of 32 columns x 8 lanes.
template <class T>
__global__ void norm_columns_vector(const NormBackwardArgs p, int teams) {
  __shared__ float part[2][8][33];
  const int column = blockIdx.x * 32 + threadIdx.x;
  float dw = 0.0f, db = 0.0f;
  if (column < p.n) {
    for (int t = threadIdx.y; t < teams; t += 8) {
      dw += p.partial[static_cast<std::int64_t>(t) * 2 * p.n + column];
      db += p.partial[static_cast<std::int64_t>(t) * 2 * p.n + p.n + column];
    }
  }
  part[0][threadIdx.y][threadIdx.x] = dw;
  part[1][threadIdx.y][threadIdx.x] = db;
  __syncthreads();
  if (threadIdx.y != 0 || column >= p.n) return;
  for (int k = 1; k < 8; ++k) dw += part[0][k][threadIdx.x], db += part[1][k][threadIdx.x];
  if (p.dweight) static_cast<T*>(p.dweight)[column] = from_float<T>(dw);
  if (p.dbias) static_cast<T*>(p.dbias)[column] = from_float<T>(db);
}

}  // namespace rm::cuda_ops
