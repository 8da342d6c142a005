// Gradients of a norm: a team of whole warps takes rows in turn, asks for its next row before it
// works on this one, and meets twice a row (rms: once): for the mean, then for three sums at once.
// Values widen once and stay fp32 in registers: 16-bit rows are bound by instructions (about 14 an
// element), not by memory. Each thread sums its own columns of dweight and dbias; at the end a
// block adds its teams' up and writes one share. For n a multiple of the vector.
#pragma once

#include "_shim/row_shim.cuh"
#include "norm/kernels/norm_vector_sm80.cuh"

namespace rm::cuda_ops {

/// Warps of a block: what the registers hold.
__host__ __device__ constexpr int norm_team_warps(int per) { return per == 1 ? 24 : 16; }

/// Sums over a team; `slot` alternates, so that one barrier is enough.
template <int kValues>
__device__ __forceinline__ void norm_team_sum(float (&v)[kValues], float* space, int team,
                                              int warps, int slot) {
#pragma unroll
  for (int k = 16; k > 0; k >>= 1) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) v[i] += __shfl_xor_sync(0xffffffffu, v[i], k);
  }
  if (warps == 1) return;
  float* mine = space + (slot * 32 + team * warps) * 4;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) mine[(threadIdx.x / 32 - team * warps) * 4 + i] = v[i];
  }
  asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(warps * 32) : "memory");
#pragma unroll
  for (int i = 0; i < kValues; ++i) v[i] = 0.0f;
#pragma unroll 4
  for (int w = 0; w < warps; ++w) {  // one 16-byte read each, the same in all lanes
    const float4 part = *reinterpret_cast<const float4*>(&mine[w * 4]);
    v[0] += part.x;
    if constexpr (kValues == 3) v[1] += part.y, v[2] += part.z;
  }
}

/// A block's share of dweight and dbias: all teams' columns through shared memory.
template <class T, int kPer>
__device__ __forceinline__ void norm_share(const NormBackwardArgs& p, float4* all, int team,
                                           int teams, int thread, int threads,
                                           const float (&dw)[kPer][kVec<T>],
                                           const float (&db)[kPer][kVec<T>]) {
  constexpr int V = kVec<T>, kQuads = kPer * V / 4;
  float4* mine = all + team * 2 * kQuads * threads + thread;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    const float *w = &dw[q / (V / 4)][q % (V / 4) * 4], *b = &db[q / (V / 4)][q % (V / 4) * 4];
    mine[q * threads] = float4{w[0], w[1], w[2], w[3]};
    mine[(kQuads + q) * threads] = float4{b[0], b[1], b[2], b[3]};
  }
  __syncthreads();
  float* share = p.partial + blockIdx.x * 2 * static_cast<std::int64_t>(p.n);
  for (int q = team; q < 2 * kQuads; q += teams) {
    const int quad = q % kQuads, i = (thread + quad / (V / 4) * threads) * V + quad % (V / 4) * 4;
    if (i >= p.n) continue;
    float4 sum = all[q * threads + thread];
    for (int t = 1; t < teams; ++t) {
      const float4 v = all[(t * 2 * kQuads + q) * threads + thread];
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    *reinterpret_cast<float4*>(share + (q < kQuads ? 0 : p.n) + i) = sum;
  }
}

template <class T, bool kRms, int kPer>
__global__ void __launch_bounds__(32 * norm_team_warps(kPer), 1)
    norm_backward_teams(const NormBackwardArgs p, int team_warps, int teams) {
  constexpr int V = kVec<T>;
  extern __shared__ float4 columns[];
  __shared__ __align__(16) float space[2 * 32 * 4];
  const int threads = team_warps * 32, team = threadIdx.x / threads;
  const int thread = threadIdx.x - team * threads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * teams;
  const float inv_n = 1.0f / static_cast<float>(p.n);
  overlap_begin(p.h, p.dy, p.weight);
  float dw[kPer][V] = {}, db[kPer][V] = {}, weight[kPer][V];
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const int i = (thread + k * threads) * V;
#pragma unroll
    for (int j = 0; j < V; ++j) weight[k][j] = 0.0f;  // columns beyond n: nothing
    if (i >= p.n) continue;
    load_or<T>(p.weight, i, 1.0f - p.weight_offset, weight[k]);
#pragma unroll
    for (int j = 0; j < V; ++j) weight[k][j] += p.weight_offset;
  }
  std::int64_t row = static_cast<std::int64_t>(blockIdx.x) * teams + team;
  RowWords<T, kPer> h, dy;
  if (row < p.rows) {
    h.load(p.h, row * p.h_pitch, thread, threads, p.n);
    dy.load(p.dy, row * p.dy_pitch, thread, threads, p.n);
  }
  int slot = 0;
  while (row < p.rows) {
    RowWords<T, kPer> next_h, next_dy;
    if (row + step < p.rows) {
      next_h.load(p.h, (row + step) * p.h_pitch, thread, threads, p.n);
      next_dy.load(p.dy, (row + step) * p.dy_pitch, thread, threads, p.n);
    }
    float x[kPer][V], g[kPer][V], sums[3] = {};  // of squares, g, g x
    if constexpr (!kRms) {
      float total[1] = {};
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
#pragma unroll
        for (int j = 0; j < V; ++j) x[k][j] = h.value(k, j), total[0] += x[k][j];
      }
      norm_team_sum(total, space, team, team_warps, slot);
      slot ^= 1;
      const float mean = total[0] * inv_n;
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
        if ((thread + k * threads) * V >= p.n) continue;  // x stays 0 there
#pragma unroll
        for (int j = 0; j < V; ++j) x[k][j] -= mean;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kPer; ++k) {
#pragma unroll
        for (int j = 0; j < V; ++j) x[k][j] = h.value(k, j);
      }
    }
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
#pragma unroll
      for (int j = 0; j < V; ++j) {
        g[k][j] = dy.value(k, j) * weight[k][j];
        sums[0] += x[k][j] * x[k][j];
        if constexpr (!kRms) sums[1] += g[k][j];
        sums[2] += g[k][j] * x[k][j];
      }
      dy.forget(k);
    }
    norm_team_sum(sums, space, team, team_warps, slot);
    slot ^= 1;
    const float rstd = rsqrtf(sums[0] * inv_n + p.eps);
    const float shift = kRms ? 0.0f : -sums[1] * inv_n * rstd;
    const float slope = -sums[2] * inv_n * rstd * rstd;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (thread + k * threads) * V;
      if (i >= p.n) continue;
      float out[V];
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float normal = x[k][j] * rstd, d = dy.value(k, j);
        dw[k][j] += d * normal;
        db[k][j] += d;
        out[j] = normal * slope + (g[k][j] * rstd + shift);
      }
      if (p.dsum) {
        float more[V];
        load_vec(static_cast<const T*>(p.dsum) + row * p.dsum_pitch + i, more);
#pragma unroll
        for (int j = 0; j < V; ++j) out[j] += more[j];
      }
      store_vec(static_cast<T*>(p.dx) + row * p.dx_pitch + i, out);
    }
    row += step;
    h = next_h, dy = next_dy;
  }
  if (p.partial) norm_share<T, kPer>(p, columns, team, teams, thread, threads, dw, db);
}

}  // namespace rm::cuda_ops
