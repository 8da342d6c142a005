// One row of 16-bit x, int8 or int4 weights: the integer tensor cores multiply (gemv_digits_sm90).
// A tile is eight rows of w, or a piece of them, about 8 KiB. Every warp owns a stage and asks for
// its next tile when it has used the last; none waits for another's. Bound: reading w.
#pragma once

#include "gemv/kernels/gemv_digits_sm90.cuh"
#include "gemv/kernels/gemv_ring_sm90.cuh"

namespace rm::cuda_ops {

/// Warps of a block: nibbles want registers.
__host__ __device__ constexpr int gemv_tensor_warps(int bits) { return bits == 8 ? 20 : 16; }

/// Asks for a tile of `rows` rows: one copy where they lie together.
__device__ __forceinline__ void gemv_tensor_ask(const GemvArgs& p, const GemvTile& t,
                                                std::uint32_t bar, std::uint32_t stage, int rows) {
  const int row0 = (blockIdx.x + t.turn * gridDim.x) * rows, have = min(rows, p.n - row0);
  const int from = t.chunk * p.chunk_bytes, bytes = min(p.chunk_bytes, p.row_bytes - from);
  const char* w = static_cast<const char*>(p.w) + row0 * p.w_pitch + from;
  barrier_expect(bar, have * bytes);
  const int copies = p.together ? 1 : have, each = p.together ? have * bytes : bytes;
#pragma unroll 1
  for (int r = 0; r < copies; ++r, w += p.w_pitch, stage += p.chunk_bytes)
    bulk_copy(stage, w, each, bar);
}

/// The elements of a finished group of rows: the slots' sums, in order.
template <class T>
__device__ __forceinline__ void gemv_tensor_store(const GemvArgs& p, const float* all, int slots,
                                                  int row0, int rows) {
  const int row = threadIdx.x % 32, n = row0 + row;
  if (row >= rows || n >= p.n) return;
  float v = 0.0f;
  for (int k = 0; k < slots; ++k) {
    const auto* from = reinterpret_cast<const float4*>(all + (k * rows + row) * 8);
    const float4 a = from[0], b = from[1];
    v += ((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w));
  }
  if (!p.plain) v = epilogue_value<T>(p.epilogue, v, 0, 0, n);
  static_cast<T*>(p.y)[n] = from_float<T>(v);
}

template <class T, class Sums>
__device__ __forceinline__ void gemv_tensor_join(const GemvArgs& p, const GemvMemory& s, int turn,
                                                 int slot, Sums& sums, int rows) {
  const int lane = threadIdx.x % 32, size = rows * 8;
  const int row0 = (blockIdx.x + turn * gridDim.x) * rows;
  float* all = reinterpret_cast<float*>(s.base + s.sums);
  if (p.chunks == 1) {
    all += static_cast<int>(threadIdx.x / 32) * size;
    __syncwarp();
    sums.store(all);
    __syncwarp();
    gemv_tensor_store<T>(p, all, 1, row0, rows);
    return;
  }
  const int buffer = turn & (p.buffers - 1), generation = turn >> p.buffer_shift;
  all += buffer * p.slots * size;
  while (*s.generation(buffer) != generation) {  // its group before is not finished yet
  }
  __syncwarp();
  sums.store(all + slot * size);
  __syncwarp();
  int before = 0;
  if (lane == 0) {
    __threadfence_block();
    before = atomicAdd(s.counter(buffer), 1);
    __threadfence_block();
  }
  if (__shfl_sync(0xffffffffu, before, 0) != p.slots - 1) return;
  gemv_tensor_store<T>(p, all, p.slots, row0, rows);
  __syncwarp();
  if (lane == 0) {
    *s.counter(buffer) = 0;
    __threadfence_block();
    *s.generation(buffer) = generation + 1;
  }
}

template <class T, int kBits>
__global__ void __launch_bounds__(32 * gemv_tensor_warps(kBits), 1)
    gemv_tensor(const __grid_constant__ GemvArgs p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  launch_dependents();
  GemvMemory s;
  s.base = memory, s.full = shared_address(memory), s.sums = 1024;
  s.x = s.sums + p.sums_bytes, s.x_sums = s.x + p.x_smem_pitch;
  s.stage = p.stages_at;
  const int warp = uniform_warp();
  constexpr int rows = 8;
  const int turns = p.full_turns + (static_cast<int>(blockIdx.x) < p.more ? 1 : 0);
  const std::uint32_t bar = s.full + 8 * warp;
  const int at = s.stage + warp * p.stage_bytes;
  if (elect_lane()) {
    barrier_init(bar, 1 + 32);
    barrier_init_done();
  }
  __syncwarp();
  const int first_turn = warp * p.chunks_inverse >> 16;
  GemvTile tile{first_turn, warp - first_turn * p.chunks};
  const auto ask = [&](const GemvTile& t) {
    if (elect_lane()) gemv_tensor_ask(p, t, bar, s.full + at, rows);
    gemv_ask_tile_scales<T, kBits>(p, t, bar, s.full + at + p.scales_at);
  };
  if (tile.turn < turns) ask(tile);
  if (threadIdx.x < kGemvBuffers) {
    *s.counter(threadIdx.x) = 0;
    *s.generation(threadIdx.x) = 0;
  }
  wait_for_previous();  // x is written by the kernel before
  const bool bad = gemv_digits<T, kBits>(
      p, memory + s.x, reinterpret_cast<float2*>(memory + s.x_sums), memory + kGemvZeros);
  if (__syncthreads_or(bad)) {
    if (tile.turn < turns) barrier_wait(bar, 0);
    gemv_plain<T>(p, blockIdx.x * rows, rows, gridDim.x * rows);
    return;
  }
  GemvDigitSums sums;
  sums.clear();
  int slot = tile.chunk, parity = 0;
  while (tile.turn < turns) {
    barrier_wait(bar, parity);
    parity ^= 1;
    gemv_digit_tile<T, kBits>(p, s, memory + at, tile.chunk, sums);
    __syncwarp();
    GemvTile following = tile;
    following.next(p);
    if (following.turn < turns) ask(following);
    if (following.turn != tile.turn) {
      gemv_tensor_join<T>(p, s, tile.turn, slot, sums, rows);
      sums.clear();
      slot = following.chunk;
    }
    tile = following;
  }
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
