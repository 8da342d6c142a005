// What the streaming gemv kernels share: a stage of shared memory each warp, the order of a block's
// tiles, x, and the end of a group of rows. No warp waits for another one.
#pragma once

#include "_shim/async_shim.cuh"
#include "_shim/epilogue_shim.cuh"
#include "gemv/kernels/gemv_args.hpp"

namespace rm::cuda_ops {

inline constexpr int kGemvMaxWarps = 24, kGemvMaxM = 8;
inline constexpr int kGemvBuffers = 8;  // groups of rows that may be unfinished at once

/// Shared memory: [barriers, counters: 1 KiB] [sums] [resident x] [a stage each warp].
struct GemvMemory {
  unsigned char* base;
  std::uint32_t full, x_bar;
  int sums, x, x_sums, stage;  // offsets
  __device__ int* counter(int buffer) const { return reinterpret_cast<int*>(base + 512) + buffer; }
  __device__ volatile int* generation(int buffer) const {
    return reinterpret_cast<volatile int*>(base + 768) + buffer;
  }
};

/// A tile of this block: the ordinal of its group of rows and of its piece of the row.
struct GemvTile {
  int turn, chunk;
  __device__ void next(const GemvArgs& p) {
    turn += p.turn_step, chunk += p.chunk_step;
    if (chunk >= p.chunks) chunk -= p.chunks, ++turn;
  }
};

/// A warp's part of a group of rows joins the others'; the last one stores the elements of y.
template <class T, int kRows, class Sums>
__device__ __forceinline__ void gemv_join(const GemvArgs& p, const GemvMemory& s, int turn,
                                          int slot, Sums& sums) {
  const int lane = threadIdx.x % 32, buffer = turn % kGemvBuffers, size = p.m * kRows;
  float* all = reinterpret_cast<float*>(s.base + s.sums) + buffer * p.slots * size;
  while (*s.generation(buffer) != turn / kGemvBuffers) {  // its group before is not finished yet
  }
  __syncwarp();
  sums.store(all + slot * size, p.m);
  __syncwarp();
  int before = 0;
  if (lane == 0) {
    __threadfence_block();
    before = atomicAdd(s.counter(buffer), 1);
    __threadfence_block();
  }
  if (__shfl_sync(0xffffffffu, before, 0) != p.slots - 1) return;
  const int row0 = (blockIdx.x + turn * gridDim.x) * kRows;
  for (int i = lane; i < size; i += 32) {
    const int m = i / kRows, n = row0 + i % kRows;
    float v = 0.0f;
    for (int k = 0; k < p.slots; ++k) v += all[k * size + i];
    if (n >= p.n) continue;
    v = epilogue_value<T>(p.epilogue, v, 0, m, n);
    static_cast<T*>(p.y)[m * p.y_pitch + n] = from_float<T>(v);
  }
  __syncwarp();
  if (lane == 0) {
    *s.counter(buffer) = 0;
    __threadfence_block();
    *s.generation(buffer) = turn / kGemvBuffers + 1;
  }
}

/// x to shared memory by plain loads: for a few KiB they are there sooner than a bulk copy.
template <class T>
__device__ __forceinline__ void gemv_load_x(const GemvArgs& p, unsigned char* to) {
  const int vectors = p.k / kVec<T>;
  for (int m = 0; m < p.m; ++m) {
    const auto* x = reinterpret_cast<const uint4*>(static_cast<const T*>(p.x) + m * p.x_pitch);
    auto* out = reinterpret_cast<uint4*>(to + m * p.x_smem_pitch);
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) out[i] = x[i];
  }
}

}  // namespace rm::cuda_ops
