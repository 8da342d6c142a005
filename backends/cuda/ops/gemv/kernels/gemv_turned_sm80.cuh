// One weight [K, N] (as GPT-2 stores them) against one row of x, which is normalised on its way. A block has
// 64 bytes of every row of w, of all rows or, where they are many, of a part of them, which the blocks of a
// cluster share out; all of it is on its way to shared memory before the block waits for x. A warp's four
// neighbouring lanes have a row's 64 bytes, 16 each, and multiply only what they asked for themselves; then
// lanes, warps and blocks add up. Bound: reading w; x comes once for each block.
#pragma once

#include "_shim/async_shim.cuh"
#include "_shim/epilogue_shim.cuh"
#include "gemv/kernels/gemv_args.hpp"

namespace rm::cuda_ops {

inline constexpr int kTurnedWarps = 8, kTurnedThreads = 32 * kTurnedWarps;
inline constexpr int kTurnedRows = 8 * kTurnedWarps;  // of w, in a turn
inline constexpr int kTurnedTurnBytes = 16 * kTurnedThreads;
inline constexpr int kTurnedSplit = 8;  // blocks of a cluster, at most

/// Columns of a block.
template <class T>
inline constexpr int kTurnedColumns = 64 / static_cast<int>(sizeof(T));

/// Offsets in bytes; the norm's operands are a block's part of them, x is whole where it is normalised.
struct GemvTurnedArgs {
  const void* w;
  std::int64_t w_pitch;  // bytes
  int k, n, split, per, turns;  // per: rows of a block, whole turns but for K's end
  int x_at, norm_at, bias_at, sums_at;  // the tiles are in front
  const void *x, *norm, *norm_bias, *bias, *residual;
  void* y;
  int centred, activation;
  float eps, weight_offset;
};

/// Mean and what a distance from it is multiplied by, of the x in shared memory; by every warp alone.
template <class T>
__device__ __forceinline__ float2 turned_moments(const GemvTurnedArgs& p, const T* x) {
  constexpr int V = kVec<T>;
  const int lane = threadIdx.x % 32, vectors = p.k / V;
  float mean = 0.0f;
  if (p.centred) {
    for (int i = lane; i < vectors; i += 32) {
      float v[V];
      load_vec<T, V>(x + i * V, v);
#pragma unroll
      for (int j = 0; j < V; ++j) mean += v[j];
    }
    mean = warp_reduce<Sum>(mean) / static_cast<float>(p.k);
  }
  float squares = 0.0f;
  for (int i = lane; i < vectors; i += 32) {
    float v[V];
    load_vec<T, V>(x + i * V, v);
#pragma unroll
    for (int j = 0; j < V; ++j) squares += (v[j] - mean) * (v[j] - mean);
  }
  return {mean, rsqrtf(warp_reduce<Sum>(squares) / static_cast<float>(p.k) + p.eps)};
}

/// Vectors from..to of a row to shared memory.
template <class T>
__device__ __forceinline__ void turned_ask_row(std::uint32_t to, const void* row, int from, int count) {
  for (int i = threadIdx.x; i < count / kVec<T>; i += kTurnedThreads) {
    copy_16_async(to + i * 16, static_cast<const T*>(row) + from + i * kVec<T>, true);
  }
}

template <class T>
__global__ void __launch_bounds__(kTurnedThreads)
    gemv_turned(const __grid_constant__ GemvTurnedArgs p) {
  constexpr int V = kVec<T>, kColumns = kTurnedColumns<T>;
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(8) std::uint64_t received;
  __shared__ __align__(8) float others[(kTurnedSplit - 1) * kColumns];  // sums of the cluster's other blocks
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = static_cast<int>(blockIdx.x) % p.split;
  const int column0 = static_cast<int>(blockIdx.x) / p.split * kColumns;
  const int first = rank * p.per, rows = min(p.per, p.k - first);
  const bool cluster = kSm90 && p.split > 1;
  if (cluster) {
    if (rank == 0 && threadIdx.x == 0) {
      barrier_init(shared_address(&received), 1);
      barrier_init_done();
      barrier_expect(shared_address(&received), (p.split - 1) * kColumns * 4);
    }
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
  }
  const std::uint32_t base = shared_address(memory);
  const int row0 = warp * 8 + lane / 4, column = column0 + lane % 4 * V;
  const char* w = static_cast<const char*>(p.w) + static_cast<std::int64_t>(first + row0) * p.w_pitch +
                  column * static_cast<int>(sizeof(T));
#pragma unroll 4
  for (int t = 0; t < p.turns; ++t) {
    const bool inside = t * kTurnedRows + row0 < rows && column < p.n;
    copy_16_async(base + t * kTurnedTurnBytes + threadIdx.x * 16,
                  inside ? w + t * kTurnedRows * p.w_pitch : p.w, inside);
  }
  if (p.norm) turned_ask_row<T>(base + p.norm_at, p.norm, first, rows);
  if (p.norm_bias) turned_ask_row<T>(base + p.bias_at, p.norm_bias, first, rows);
  copy_group_end();
  launch_dependents();
  const int mine = column0 + static_cast<int>(threadIdx.x);  // the column that this thread stores
  const bool stores = rank == 0 && threadIdx.x < kColumns && mine < p.n;
  float bias = 0.0f, residual = 0.0f;
  if (stores && p.bias) bias = to_float(__ldg(static_cast<const T*>(p.bias) + mine));
  wait_for_previous();  // x and the residual are written by kernels before
  const int x_from = p.norm ? 0 : first, x_count = p.norm ? p.k : rows;
  for (int i = threadIdx.x; i < x_count / V; i += kTurnedThreads) {
    *reinterpret_cast<uint4*>(memory + p.x_at + i * 16) =
        __ldcg(reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + x_from) + i);
  }
  if (stores && p.residual) residual = to_float(__ldcg(static_cast<const T*>(p.residual) + mine));
  copy_groups_wait<0>();
  __syncthreads();
  const T* x = reinterpret_cast<const T*>(memory + p.x_at) + (p.norm ? first : 0);
  const T* weight = reinterpret_cast<const T*>(memory + p.norm_at);
  const T* shift = reinterpret_cast<const T*>(memory + p.bias_at);
  float2 moments{0.0f, 1.0f};
  if (p.norm) moments = turned_moments<T>(p, reinterpret_cast<const T*>(memory + p.x_at));
  float sum[V] = {};
#pragma unroll 4
  for (int t = 0; t < p.turns; ++t) {
    const int k = t * kTurnedRows + row0;
    if (k >= rows) break;
    float a = to_float(x[k]), of[V];
    if (p.norm) {
      a = (a - moments.x) * moments.y * (to_float(weight[k]) + p.weight_offset);
      if (p.norm_bias) a += to_float(shift[k]);
      a = to_float(from_float<T>(a));  // as a norm of its own stores it
    }
    load_vec<T, V>(reinterpret_cast<const T*>(memory + t * kTurnedTurnBytes + threadIdx.x * 16), of);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = fmaf(a, of[j], sum[j]);
  }
#pragma unroll
  for (int m = 4; m < 32; m *= 2) {
#pragma unroll
    for (float& v : sum) v += __shfl_xor_sync(0xffffffffu, v, m);
  }
  auto* sums = reinterpret_cast<float*>(memory + p.sums_at);  // [warp][column]
  if (lane < 4) {
#pragma unroll
    for (int j = 0; j < V; ++j) sums[warp * kColumns + lane * V + j] = sum[j];
  }
  __syncthreads();
  if (cluster) asm volatile("barrier.cluster.wait;" ::: "memory");  // the first block's barrier is there
  if (threadIdx.x >= kColumns) return;
  float v = 0.0f;
#pragma unroll
  for (int i = 0; i < kTurnedWarps; ++i) v += sums[i * kColumns + threadIdx.x];
  if (cluster) {
    if (rank > 0) {
      const float next = __shfl_down_sync(kColumns == 32 ? 0xffffffffu : (1u << kColumns) - 1, v, 1);
      if (threadIdx.x % 2 == 0) {
        cluster_send({v, next}, shared_address(others + (rank - 1) * kColumns + threadIdx.x),
                     shared_address(&received), 0);
      }
      return;
    }
    barrier_wait(shared_address(&received), 0);
    for (int i = 0; i < p.split - 1; ++i) v += others[i * kColumns + threadIdx.x];
  }
  if (!stores) return;
  v = activate<sizeof(T) == 2>(p.activation, v + bias, 0.0f);
  static_cast<T*>(p.y)[mine] = from_float<T>(v + residual);
}

}  // namespace rm::cuda_ops
