// A group of weights with long rows against a few rows of x, more than a block of gemv_group_waves_sm90 holds:
// the blocks of a cluster have neighbouring pieces of the same rows of w. Each reads only its piece of x, which
// for eight rows of x is as much as a block's weights, and adds up over it as gemv_waves does. Then the blocks
// share out the elements: each sends every other one its sums of that one's elements, which are added in the
// order of the pieces, a turn later, when most have long arrived. For M <= 8, 16 bits. Bound: reading w.
#pragma once

#include "gemv/kernels/gemv_waves_sm90.cuh"

namespace rm::cuda_ops {

inline constexpr int kGemvMostParts = 8;  // blocks of a cluster that a card always takes

struct GemvPartsArgs {
  int parts;       // of a row of w: the blocks of a cluster
  int part_bytes;  // of a row: whole lines of 128 bytes; the last part has the rest
};

/// Rows of w in a turn, and what the block's memory has in front of its stages: barriers of the stages and of
/// what the cluster sends; two turns' sums of the warps; several turns' sums of the cluster's blocks; squares of
/// the warps and of the blocks.
inline constexpr int kGemvPartsRows = 16, kGemvPartsElements = 8 * kGemvPartsRows;
/// Turns whose sums are in the block's memory at once. A block that sends those of turn t has those of t - 2 of
/// all others, which then have stored their elements of t - 4.
inline constexpr int kGemvPartsTurns = 4;
inline constexpr int kGemvPartsSums = 128,
                     kGemvPartsOthers = kGemvPartsSums + 2 * kGemvWavesWarps * kGemvPartsElements * 4,
                     kGemvPartsSquares = kGemvPartsOthers + kGemvPartsTurns * kGemvPartsElements * 8,
                     kGemvPartsFront = kGemvPartsSquares + 8 * (kGemvWavesWarps + kGemvMostParts) * 4;

/// The block's part of a row of x and w, its place in the cluster, and the elements that it stores.
template <class T>
struct GemvParts {
  const GemvArgs& p;  // of the piece alone
  const GemvGroupArgs& g;
  unsigned char* memory;
  int rank, parts, each;  // each: elements of a block
  bool gated;

  __device__ __forceinline__ std::uint32_t bar(int turn) const {
    return shared_address(memory) + 64 + 8 * (turn % kGemvPartsTurns);
  }
  __device__ __forceinline__ int sums_at(int turn, int of, int i) const {
    return kGemvPartsOthers + ((turn % kGemvPartsTurns) * kGemvPartsElements + of * each + i) * 8;
  }
  __device__ __forceinline__ float* warp_squares() const {
    return reinterpret_cast<float*>(memory + kGemvPartsSquares);
  }
  __device__ __forceinline__ int squares_at(int of) const {
    return kGemvPartsSquares + (8 * kGemvWavesWarps + 8 * of) * 4;
  }
  __device__ __forceinline__ bool normed() const { return g.norm != nullptr; }

  /// Asks for a piece of a turn's rows. Called by one lane.
  __device__ __forceinline__ void ask(std::uint32_t full, std::uint32_t stage, int row0, int from) const {
    const int have = min(kGemvPartsRows, p.n - row0), part = gated ? 0 : gemv_part(g, row0);
    const int row = gated ? row0 / 2 : row0 - g.first[part], first = gated ? have / 2 : have;
    const std::int64_t at = row * p.w_pitch + from;
    barrier_expect(full, have * p.row_bytes);
    const char* w = static_cast<const char*>(g.w[part]) + at;
#pragma unroll 1
    for (int r = 0; r < first; ++r, w += p.w_pitch) bulk_copy(stage + r * p.row_bytes, w, p.row_bytes, full);
    if (!gated) return;
    w = static_cast<const char*>(g.w[1]) + at;
    stage += kGemvPartsRows / 2 * p.row_bytes;
#pragma unroll 1
    for (int r = 0; r < first; ++r, w += p.w_pitch) bulk_copy(stage + r * p.row_bytes, w, p.row_bytes, full);
  }

  /// What will come of a turn from the other blocks.
  __device__ __forceinline__ void expect(int turn) const {
    const int squares = turn == 0 && normed() ? 8 * 4 : 0;
    barrier_expect(bar(turn), (parts - 1) * (each * 8 + squares));
  }

  /// This block's sums of squares of its piece of the rows of x, to all blocks.
  __device__ __forceinline__ void send_squares() const {
    const int i = static_cast<int>(threadIdx.x), to = i / 8, m = i % 8;
    if (to >= parts) return;
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kGemvWavesWarps; ++k) sum += warp_squares()[m * kGemvWavesWarps + k];
    const float next = __shfl_down_sync(__activemask(), sum, 1);
    auto* here = reinterpret_cast<float*>(memory + squares_at(rank)) + m;
    if (to == rank) {
      *here = sum;
    } else if (m % 2 == 0) {
      cluster_send({sum, next}, shared_address(here), bar(0), to);
    }
  }

  /// The sums of an element of a turn, of all blocks; stores it.
  __device__ __forceinline__ void finish(int turn, float2 mine, int row0) const {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= each * parts || i / each != rank) return;
    barrier_wait(bar(turn), turn / kGemvPartsTurns % 2);
    float v = 0.0f, u = 0.0f;
    for (int k = 0; k < parts; ++k) {
      const auto* there = reinterpret_cast<const float2*>(memory + sums_at(turn, k, i - rank * each));
      const float2 of = k == rank ? mine : *there;
      v += of.x, u += of.y;
    }
    const int row = i / 8, m = i % 8, have = min(kGemvPartsRows, p.n - row0);
    if (row >= (gated ? have / 2 : have) || m >= p.m) return;
    if (normed()) {
      float squares = 0.0f;
      for (int k = 0; k < parts; ++k) squares += reinterpret_cast<const float*>(memory + squares_at(k))[m];
      const float inverse = rsqrtf(squares / static_cast<float>(p.k) + g.eps);
      v *= inverse, u *= inverse;
    }
    gemv_group_store<T>(p, g, v, u, row0, row, m);
  }
};

template <class T>
__device__ __forceinline__ void gemv_parts_block(const GemvArgs& given, const GemvPartsArgs& cut,
                                                 const GemvGroupArgs& g) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int kElements = kGemvPartsElements;
  const int rank = static_cast<int>(blockIdx.x) % cut.parts, from = rank * cut.part_bytes;
  const int step = static_cast<int>(gridDim.x) / cut.parts * kGemvPartsRows;
  GemvArgs p = given;  // of this piece
  p.row_bytes = min(cut.part_bytes, given.row_bytes - from);
  p.steps = (p.row_bytes + 63) / 64;
  p.x = static_cast<const char*>(given.x) + from;
  GemvGroupArgs norm{};  // what sums need of the group: the norm of this piece
  norm.weight_offset = g.weight_offset;
  if (g.norm != nullptr) norm.norm = static_cast<const char*>(g.norm) + from;
  const bool gated = g.gated != 0;
  const int count = gated ? kElements / 2 : kElements, each = count / cut.parts;
  const GemvParts<T> block{p, g, memory, rank, cut.parts, each, gated};
  const int warp = uniform_warp(), i = static_cast<int>(threadIdx.x), owner = i / each;
  const bool leads = elect_lane();
  const std::uint32_t base = shared_address(memory);
  int row0 = static_cast<int>(blockIdx.x) / cut.parts * kGemvPartsRows;
  const auto ask = [&](int stage, int row) {
    block.ask(base + 8 * stage, base + p.stages_at + stage * p.stage_bytes, row, from);
  };
  if (warp < p.stages && leads) {
    barrier_init(base + 8 * warp, 1);
    if (warp == 0) {
      for (int t = 0; t < kGemvPartsTurns; ++t) barrier_init(block.bar(t), 1);
    }
    barrier_init_done();
    if (row0 + warp * step < p.n) ask(warp, row0 + warp * step);
  }
  __syncthreads();
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");  // behind the barriers' beginning
  launch_dependents();
  wait_for_previous();  // x and the residual are written by kernels before
  uint4 xs[8];
  int stage = 0, parity = 0, before = 0;
  float squares = 0.0f;
  float2 mine{0.0f, 0.0f};
  for (int turn = 0;; ++turn) {
    if (i == 0) block.expect(turn);
    float sum[1][gemv_waves_chains(1)][4] = {};
    gemv_waves_sum<T, 1, 1>(p, norm, squares, memory + p.stages_at + stage * p.stage_bytes, base + 8 * stage,
                            parity, turn == 0, xs, sum);
    auto* all = reinterpret_cast<float*>(memory + kGemvPartsSums) + turn % 2 * kGemvWavesWarps * kElements;
    gemv_waves_store<1, 1>(all + warp * kElements, sum);
    if (turn == 0 && block.normed()) {
      squares += __shfl_xor_sync(0xffffffffu, squares, 1);
      squares += __shfl_xor_sync(0xffffffffu, squares, 2);  // lanes of one row of x
      if (i % 4 == 0) block.warp_squares()[i % 32 / 4 * kGemvWavesWarps + warp] = squares;
    }
    __syncthreads();
    const int ahead = row0 + p.stages * step;
    if (warp == stage && leads && ahead < p.n) ask(stage, ahead);
    if (turn == 0) {
      asm volatile("barrier.cluster.wait;" ::: "memory");  // all have their barriers
      if (block.normed()) block.send_squares();
    } else {
      block.finish(turn - 1, mine, before);
    }
    if (i < count) {
      mine = {0.0f, 0.0f};
#pragma unroll
      for (int k = 0; k < kGemvWavesWarps; ++k) {
        mine.x += all[k * kElements + i];
        if (gated) mine.y += all[k * kElements + count + i];
      }
      if (owner != rank) {
        cluster_send(mine, base + block.sums_at(turn, rank, i - owner * each), block.bar(turn), owner);
      }
    }
    before = row0;
    row0 += step;
    if (row0 >= p.n) {
      __syncthreads();  // a thread's own squares
      block.finish(turn, mine, before);
      return;
    }
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }
}

template <class T>
__global__ void __launch_bounds__(32 * kGemvWavesWarps, 2)
    gemv_group_parts(const __grid_constant__ GemvArgs p, const __grid_constant__ GemvPartsArgs cut,
                     const __grid_constant__ GemvGroupArgs g) {
#if __CUDA_ARCH__ >= 900
  gemv_parts_block<T>(p, cut, g);
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
