// x and w of 16 bits: a turn of a block is a few whole rows of w, asked for in one copy. Two blocks
// a multiprocessor, of one stage of about 64 KiB or two of 32: one computes while the other's rows
// come, and each is replaced by the next kernel's as it ends.
// The tensor cores multiply. A product's 16 rows are 16 / kSegments rows of w in kSegments pieces
// of 64 bytes, its 8 columns 8 / kSegments rows of x in the same pieces; only where the pieces
// agree is the result of use. The warps share out the columns of w: each holds its part of x in
// registers. For M <= 8. Bound: reading w; x comes once for each block.
#pragma once

#include "_shim/async_shim.cuh"
#include "_shim/epilogue_shim.cuh"
#include "gemv/kernels/gemv_group_sm90.cuh"
#include "gemv/kernels/gemv_unpack_sm90.cuh"

namespace rm::cuda_ops {

inline constexpr int kGemvWavesWarps = 8;
/// Bytes of a stage of which a block has two.
inline constexpr int kGemvWavesStages = 2, kGemvWavesSmall = 32 * 1024;
/// Bytes of w in a turn, as far as whole rows of w give them: one stage of 64 KiB; of several rows of x and
/// a large w two of half of it. With one row of x two stages take an H200 5 % longer for layers of an 8 B
/// Llama (119.8 us, 113.7) and 1 % for a 1 B one.
inline int gemv_waves_turn(const GemvArgs& a) {
  const std::int64_t bytes = static_cast<std::int64_t>(a.n) * a.row_bytes;
  const bool large = a.m > 1 && bytes >= (a.row_bytes <= 8192 ? 24ll : 40ll) << 20;
  return large ? kGemvWavesSmall : 64 * 1024;
}
/// A turn's bytes of the fewest rows that a kernel takes are no more than that.
inline constexpr int kGemvWavesMost = 72 * 1024;
/// Chains of products in a sum: one where sums take most registers.
__host__ __device__ constexpr int gemv_waves_chains(int pairs) { return pairs >= 8 ? 1 : 2; }
/// Rows of w in a turn.
__host__ __device__ constexpr int gemv_waves_rows(int segments, int pairs) {
  return pairs == 0 ? 8 / segments : pairs * 16 / segments;
}
/// Registers' pairs; none: the products' second eight rows are zeros.
__host__ __device__ constexpr int gemv_waves_pairs(int pairs) { return pairs == 0 ? 1 : pairs; }

/// Asks for a turn's rows: one copy where they lie together. Called by one lane.
template <int kRows, class Group>
__device__ __forceinline__ void gemv_waves_ask(const GemvArgs& p, const Group& g, std::uint32_t bar,
                                               std::uint32_t stage, int row0, int have) {
  if constexpr (kGemvGroup<Group>) {
    gemv_group_ask<kRows>(p, g, bar, stage, row0, have);
    return;
  }
  barrier_expect(bar, have * p.row_bytes);
  const char* w = static_cast<const char*>(p.w) + row0 * p.w_pitch;
  const int copies = p.together ? 1 : have, each = p.together ? have * p.row_bytes : p.row_bytes;
#pragma unroll 1
  for (int r = 0; r < copies; ++r, w += p.w_pitch) bulk_copy(stage + r * p.row_bytes, w, each, bar);
}

/// This warp's sums over its columns. x: this lane's part of the first kHeld steps, once loaded.
template <class T, int kPairs, int kSegments, int kHeld, class Group>
__device__ __forceinline__ void gemv_waves_sum(
    const GemvArgs& p, const Group& g, float& squares, const unsigned char* stage, std::uint32_t bar, int parity, bool first_turn,
    uint4 (&xs)[kHeld], float (&sum)[gemv_waves_pairs(kPairs)][gemv_waves_chains(kPairs)][4]) {
  constexpr int kStep = 64 * kSegments, kHalf = 8 / kSegments;  // rows of half a pair
  const int lane = threadIdx.x % 32, row = lane / 4 / kSegments,
            at0 = lane / 4 % kSegments * 64 + lane % 4 * 16;
  const auto* x = reinterpret_cast<const unsigned char*>(static_cast<const T*>(p.x) +
                                                         min(row, p.m - 1) * p.x_pitch);
  stage += row * p.row_bytes;
  for (int first = uniform_warp(); first < p.steps; first += kHeld * kGemvWavesWarps) {
    if (first_turn || p.steps > kHeld * kGemvWavesWarps) {
#pragma unroll
      for (int j = 0; j < kHeld; ++j) {  // past the L1 cache: the kernel before may still run here
        const int at = (first + j * kGemvWavesWarps) * kStep + at0;
        xs[j] =
            at < p.row_bytes ? __ldcg(reinterpret_cast<const uint4*>(x + at)) : uint4{0, 0, 0, 0};
      }
      if constexpr (kGemvGroup<Group>) {
        if (g.norm != nullptr) {
#pragma unroll
          for (int j = 0; j < kHeld; ++j) {
            const int at = (first + j * kGemvWavesWarps) * kStep + at0;
            if (at >= p.row_bytes) continue;
            const auto* weight = static_cast<const unsigned char*>(g.norm) + at;
            xs[j] = gemv_normed<T>(g, xs[j], __ldg(reinterpret_cast<const uint4*>(weight)), squares);
          }
        }
      }
    }
    barrier_wait(bar, parity);
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      if (first + j * kGemvWavesWarps >= p.steps) break;
      const int at = (first + j * kGemvWavesWarps) * kStep + at0;
      const bool inside = at < p.row_bytes;  // what lies behind the row may be anything
      const unsigned char* w = stage + at;
#pragma unroll
      for (int r = 0; r < gemv_waves_pairs(kPairs); ++r, w += 2 * kHalf * p.row_bytes) {
        const uint4 a = read_16(w, inside);
        uint4 b{0, 0, 0, 0};
        if constexpr (kPairs > 0) b = read_16(w + kHalf * p.row_bytes, inside);
        mma_16816<T>(sum[r][0], a.x, b.x, a.y, b.y, xs[j].x, xs[j].y);
        mma_16816<T>(sum[r][gemv_waves_chains(kPairs) - 1], a.z, b.z, a.w, b.w, xs[j].z, xs[j].w);
      }
    }
  }
}

/// One row of x, all of which the block's warps hold (kHeld suffices for what launches give them), centred.
template <class T, int kHeld>
__device__ __forceinline__ void gemv_waves_centre(const GemvArgs& p, const GemvCentredArgs& g,
                                                  uint4 (&xs)[kHeld]) {
  const int lane = threadIdx.x % 32, warp = uniform_warp();
  const auto at = [&](int j) {  // as gemv_waves_sum
    return (warp + j * kGemvWavesWarps) * 512 + lane / 4 * 64 + lane % 4 * 16;
  };
#pragma unroll
  for (int j = 0; j < kHeld; ++j) {
    xs[j] = at(j) < p.row_bytes
                ? __ldcg(reinterpret_cast<const uint4*>(static_cast<const char*>(p.x) + at(j)))
                : uint4{0, 0, 0, 0};
  }
  gemv_centre<T>(p, g, xs, at);
}

/// [row of w][column of the products], those where the pieces agree.
template <int kPairs, int kSegments>
__device__ __forceinline__ void gemv_waves_store(
    float* to, const float (&sum)[gemv_waves_pairs(kPairs)][gemv_waves_chains(kPairs)][4]) {
  constexpr int kHalf = 8 / kSegments;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < gemv_waves_pairs(kPairs); ++i) {
#pragma unroll
    for (int j = 0; j < (kPairs > 0 ? 4 : 2); ++j) {
      const int column = 2 * t + j % 2, row = (2 * i + j / 2) * kHalf + g / kSegments;
      float v = sum[i][0][j];
      if constexpr (gemv_waves_chains(kPairs) == 2) v += sum[i][1][j];
      if (column % kSegments == g % kSegments) to[row * 8 + column] = v;
    }
  }
}

/// The elements of a turn's rows, from all warps' sums.
template <class T, int kRows, int kSegments>
__device__ __forceinline__ void gemv_waves_finish(const GemvArgs& p, const float* all, int row0,
                                                  int have, float residual) {
  const int i = threadIdx.x, n = row0 + i / 8, m = i % 8 / kSegments;
  if (i >= kRows * 8 && i >= 32) return;
  float v = 0.0f;
  for (int k = 0; k < kGemvWavesWarps && i < kRows * 8; ++k) v += all[k * kRows * 8 + i];
#pragma unroll
  for (int k = 1; k < kSegments; k <<= 1) v += __shfl_xor_sync(0xffffffffu, v, k);
  if (i % kSegments != 0 || i / 8 >= have || m >= p.m) return;
  v = gemv_value<T>(p, v, m, n, residual);
  static_cast<T*>(p.y)[m * p.y_pitch + n] = from_float<T>(v);
}

/// Sums of squares of all rows of x, a warp's each: in front of the stages.
inline constexpr int kGemvWavesSquares = 8 * kGemvWavesWarps * 4;

template <class T, int kPairs, int kSegments, class Group>
__device__ __forceinline__ void gemv_waves_block(const GemvArgs& p, const Group& g) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int kRows = gemv_waves_rows(kSegments, kPairs);
  constexpr int kHeld = kPairs >= 8 ? 2 : kPairs == 4 ? 4 : 8;  // steps of x that a warp holds
  const int warp = uniform_warp(), step = gridDim.x * kRows;
  const bool leads = elect_lane();
  const std::uint32_t base = shared_address(memory);
  const auto ask = [&](int stage, int row) {
    gemv_waves_ask<kRows>(p, g, base + 8 * stage, base + p.stages_at + stage * p.stage_bytes, row,
                          min(kRows, p.n - row));
  };
  int row0 = blockIdx.x * kRows;
  if (warp < p.stages && leads) {  // a stage each warp: asking takes long
    barrier_init(base + 8 * warp, 1);
    barrier_init_done();
    if (row0 + warp * step < p.n) ask(warp, row0 + warp * step);
  }
  launch_dependents();
  __syncthreads();
  wait_for_previous();  // x is written by the kernel before
  uint4 xs[kHeld];
  if constexpr (kGemvCentred<Group>) gemv_waves_centre<T>(p, g, xs);
  int stage = 0, parity = 0;
  float squares = 0.0f;
  auto* all_squares = reinterpret_cast<float*>(memory + p.stages_at - kGemvWavesSquares);
  for (int turn = 0;; ++turn) {
    float sum[gemv_waves_pairs(kPairs)][gemv_waves_chains(kPairs)][4] = {};
    float residual = 0.0f;
    if constexpr (!kGemvGroup<Group>) residual = gemv_residual<T, kSegments>(p, row0, kRows);
    gemv_waves_sum<T, kPairs, kSegments>(p, g, squares, memory + p.stages_at + stage * p.stage_bytes,
                                         base + 8 * stage, parity, turn == 0 && !kGemvCentred<Group>,
                                         xs, sum);
    auto* all = reinterpret_cast<float*>(memory + 128) + turn % 2 * kGemvWavesWarps * kRows * 8;
    gemv_waves_store<kPairs, kSegments>(all + warp * kRows * 8, sum);
    if constexpr (kGemvGroup<Group>) {
      if (turn == 0 && g.norm != nullptr) {
        // lanes of one row of x
#pragma unroll
        for (int k = 1; k < 4 * kSegments; k <<= 1) squares += __shfl_xor_sync(0xffffffffu, squares, k);
        const int lane = threadIdx.x % 32;
        if (lane % (4 * kSegments) == 0) all_squares[lane / (4 * kSegments) * kGemvWavesWarps + warp] = squares;
      }
    }
    __syncthreads();
    const int ahead = row0 + p.stages * step;
    if (warp == stage && leads && ahead < p.n) ask(stage, ahead);
    const int have = min(kRows, p.n - row0);
    if constexpr (kGemvGroup<Group>) {
      gemv_group_finish<T, kRows, kGemvWavesWarps, kSegments>(p, g, all_squares, all, kRows * 8, row0,
                                                              have);
    } else {
      gemv_waves_finish<T, kRows, kSegments>(p, all, row0, have, residual);
    }
    row0 += step;
    if (row0 >= p.n) return;
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }
}

template <class T, int kPairs, int kSegments>
__global__ void __launch_bounds__(32 * kGemvWavesWarps, 2)
    gemv_waves(const __grid_constant__ GemvArgs p) {
#if __CUDA_ARCH__ >= 900
  gemv_waves_block<T, kPairs, kSegments>(p, GemvAlone{});
#else
  __trap();  // why_not keeps older architectures away
#endif
}

template <class T, int kPairs, int kSegments, class Group>
__global__ void __launch_bounds__(32 * kGemvWavesWarps, 2)
    gemv_group_waves(const __grid_constant__ GemvArgs p, const __grid_constant__ Group g) {
#if __CUDA_ARCH__ >= 900
  gemv_waves_block<T, kPairs, kSegments>(p, g);
#else
  __trap();  // why_not keeps older architectures away
#endif
}

inline constexpr int kGemvOnceRows = 16, kGemvOnceBytes = 512 * kGemvWavesWarps;  // of a row

/// One turn of a small w against one row of x: every warp has its part of w in registers before it
/// waits for x. Shared memory must hold 16 rows of 4 KiB, shorter ones too.
template <class T, class Group>
__device__ __forceinline__ void gemv_once_block(const GemvArgs& p, const Group& g) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int kRows = kGemvOnceRows, kPairs = kRows / 2;
  const int warp = uniform_warp(), lane = threadIdx.x % 32;
  const std::uint32_t bar = shared_address(memory);
  const int row0 = blockIdx.x * kRows, have = min(kRows, p.n - row0);
  if (warp == 0 && elect_lane()) {
    barrier_init(bar, 1);
    barrier_init_done();
    gemv_waves_ask<kRows>(p, g, bar, bar + p.stages_at, row0, have);
  }
  launch_dependents();
  __syncthreads();
  barrier_wait(bar, 0);
  const int at = warp * 512 + lane * 16;
  const bool inside = at < p.row_bytes;
  const unsigned char* stage = memory + p.stages_at + at;
  uint4 w[2 * kPairs];
#pragma unroll
  for (int r = 0; r < 2 * kPairs; ++r) w[r] = read_16(stage + r * p.row_bytes, inside);
  uint4 weight{0, 0, 0, 0};
  if constexpr (kGemvGroup<Group>) {
    if (g.norm != nullptr && inside) {
      weight = __ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(g.norm) + at));
    }
  }
  float sum[kPairs][1][4] = {};
  float residual = 0.0f;
  int once = p.m;  // m is 1; a loop, as in gemv_quant_once_sm90.cuh
#pragma unroll 1
  do {
    wait_for_previous();  // x is written by the kernel before
    if constexpr (!kGemvGroup<Group>) residual = gemv_residual<T, 8>(p, row0, kRows);
    uint4 x{0, 0, 0, 0};
    if (inside) x = __ldcg(reinterpret_cast<const uint4*>(static_cast<const char*>(p.x) + at));
    if constexpr (kGemvCentred<Group>) {
      uint4 one[1] = {x};
      gemv_centre<T>(p, g, one, [&](int) { return at; });
      x = one[0];
    } else if constexpr (kGemvGroup<Group>) {
      if (g.norm != nullptr) {
        float squares = 0.0f;
        if (inside) x = gemv_normed<T>(g, x, weight, squares);
        const float total = warp_reduce<Sum>(squares);
        if (lane == 0) gemv_squares(memory)[warp] = total;
      }
    }
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      const uint4 a = w[2 * r], b = w[2 * r + 1];
      mma_16816<T>(sum[r][0], a.x, b.x, a.y, b.y, x.x, x.y);
    }
#pragma unroll
    for (int r = 0; r < kPairs; ++r) {
      const uint4 a = w[2 * r], b = w[2 * r + 1];
      mma_16816<T>(sum[r][0], a.z, b.z, a.w, b.w, x.z, x.w);
    }
  } while (--once > 0);
  auto* all = reinterpret_cast<float*>(memory + 128);
  gemv_waves_store<kPairs, 8>(all + warp * kRows * 8, sum);
  __syncthreads();
  if constexpr (kGemvGroup<Group>) {
    gemv_group_finish<T, kRows, kGemvWavesWarps>(p, g, gemv_squares(memory), all, kRows * 8, row0,
                                                   have);
  } else {
    gemv_waves_finish<T, kRows, 8>(p, all, row0, have, residual);
  }
}

template <class T>
__global__ void __launch_bounds__(32 * kGemvWavesWarps, 2)
    gemv_once(const __grid_constant__ GemvArgs p) {
#if __CUDA_ARCH__ >= 900
  gemv_once_block<T>(p, GemvAlone{});
#else
  __trap();  // why_not keeps older architectures away
#endif
}

template <class T, class Group>
__global__ void __launch_bounds__(32 * kGemvWavesWarps, 2)
    gemv_group_once(const __grid_constant__ GemvArgs p, const __grid_constant__ Group g) {
#if __CUDA_ARCH__ >= 900
  gemv_once_block<T>(p, g);
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
