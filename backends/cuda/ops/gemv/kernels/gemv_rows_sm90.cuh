// One row of x: a tile is kRows whole rows of w, or a piece of one, in one bulk copy of about 8
// KiB; every lane multiplies its 16 bytes of each 512. Copies of whole rows reach more of the
// memory's bandwidth than gemv_bulk's eight pieces, but cannot feed the tensor cores. fp32, bf16,
// fp16.
#pragma once

#include "gemv/kernels/gemv_ring_sm90.cuh"

namespace rm::cuda_ops {

inline constexpr int kGemvRowsTile = 8192;

/// Sums of kRows rows in one warp.
template <int kRows>
struct GemvRowSums {
  float sum[kRows];
  __device__ void clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sum[r] = 0.0f;
  }
  __device__ void store(float* sums, int) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float v = warp_reduce<Sum>(sum[r]);
      if (threadIdx.x % 32 == r) sums[r] = v;
    }
  }
};

/// Eight bf16 or fp16 values, or four fp32, of 16 bytes.
template <class T>
__device__ __forceinline__ void widen_16(const unsigned char* at, float (&out)[kVec<T>]) {
  load_vec<T, kVec<T>>(reinterpret_cast<const T*>(at), out);
}

template <class T, int kRows>
__device__ __forceinline__ void gemv_rows_tile(const unsigned char* stage, const unsigned char* x,
                                               int bytes, int pitch, GemvRowSums<kRows>& sums) {
  constexpr int V = kVec<T>;
  const int lane16 = threadIdx.x % 32 * 16;
#pragma unroll 4
  for (int at = lane16; at < bytes; at += 512) {
    float a[V], w[V];
    widen_16<T>(x + at, a);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      widen_16<T>(stage + r * pitch + at, w);
#pragma unroll
      for (int j = 0; j < V; ++j) sums.sum[r] += a[j] * w[j];
    }
  }
}

/// One lane asks for a tile: one copy where its rows lie together.
template <class T, int kRows>
__device__ __forceinline__ void gemv_rows_ask(const GemvArgs& p, const GemvTile& t,
                                              std::uint32_t bar, std::uint32_t stage) {
  const int row0 = (blockIdx.x + t.turn * gridDim.x) * kRows, rows = min(kRows, p.n - row0);
  const int row_bytes = p.k * static_cast<int>(sizeof(T)), from = t.chunk * p.chunk_bytes;
  const int bytes = min(p.chunk_bytes, row_bytes - from);
  const char* w = static_cast<const char*>(p.w) + row0 * p.w_pitch + from;
  barrier_expect(bar, rows * bytes);
  if constexpr (kRows > 1) {
    if (p.w_pitch != row_bytes) {
      for (int r = 0; r < rows; ++r, w += p.w_pitch) bulk_copy(stage + r * bytes, w, bytes, bar);
      return;
    }
  }
  bulk_copy(stage, w, rows * bytes, bar);
}

template <class T, int kRows>
__global__ void __launch_bounds__(kGemvMaxWarps * 32, 1)
    gemv_rows_bulk(const __grid_constant__ GemvArgs p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  GemvMemory s;
  s.base = memory, s.full = shared_address(memory), s.sums = 1024, s.x = 1024 + p.sums_bytes;
  s.stage = s.x + p.x_smem_pitch;
  launch_dependents();
  const int warp = uniform_warp(), lane = threadIdx.x % 32;
  if (threadIdx.x < kGemvBuffers) {
    *s.counter(threadIdx.x) = 0;
    *s.generation(threadIdx.x) = 0;
  }
  const std::uint32_t bar = s.full + 8 * warp, stage = s.full + s.stage + warp * kGemvRowsTile;
  const int all = (p.n + kRows - 1) / kRows;
  const int turns = (all - static_cast<int>(blockIdx.x) + gridDim.x - 1) / gridDim.x;
  GemvTile tile{warp / p.chunks, warp % p.chunks};
  if (elect_lane()) {
    barrier_init(bar, 1);
    barrier_init_done();
    if (tile.turn < turns) gemv_rows_ask<T, kRows>(p, tile, bar, stage);
  }
  wait_for_previous();  // x is written by the kernel before
  gemv_load_x<T>(p, s.base + s.x);
  __syncthreads();
  GemvRowSums<kRows> sums;
  sums.clear();
  const int row_bytes = p.k * static_cast<int>(sizeof(T));
  int slot = tile.chunk, parity = 0;
  while (tile.turn < turns) {
    barrier_wait(bar, parity);
    parity ^= 1;
    const int from = tile.chunk * p.chunk_bytes, bytes = min(p.chunk_bytes, row_bytes - from);
    gemv_rows_tile<T, kRows>(s.base + s.stage + warp * kGemvRowsTile, s.base + s.x + from, bytes,
                             bytes, sums);
    __syncwarp();
    GemvTile following = tile;
    following.next(p);
    if (following.turn < turns && elect_lane()) gemv_rows_ask<T, kRows>(p, following, bar, stage);
    __syncwarp();
    if (p.chunks > 1 && following.turn != tile.turn) {
      gemv_join<T, kRows>(p, s, tile.turn, slot, sums);
      sums.clear();
      slot = following.chunk;
    } else if (p.chunks == 1) {
      const int row0 = (blockIdx.x + tile.turn * gridDim.x) * kRows;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float v = warp_reduce<Sum>(sums.sum[r]);
        if (lane == r && row0 + r < p.n) {
          static_cast<T*>(p.y)[row0 + r] =
              from_float<T>(epilogue_value<T>(p.epilogue, v, 0, 0, row0 + r));
        }
      }
      sums.clear();
    }
    tile = following;
  }
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
