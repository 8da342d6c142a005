// int8 and int4 weights against one row of 16-bit x whose digits (gemv_digits_sm90) the warps hold
// in registers: each its own columns of w. A stage of a block is a few whole rows of w, asked for
// in one copy, and their scales. Two blocks of eight warps a multiprocessor: one reads while the
// other begins or ends, and each is replaced by the next kernel's as it ends; one block of sixteen
// where eight warps cannot hold x. For K <= 16384. Bound: reading w. One weight, or a group of them
// whose row of x may be normalised first (gemv_group_sm90).
#pragma once

#include "gemv/kernels/gemv_digits_sm90.cuh"
#include "gemv/kernels/gemv_group_naive_any.cuh"
#include "gemv/kernels/gemv_group_sm90.cuh"

namespace rm::cuda_ops {

/// Rows of w in a stage: eights of them, or none for four.
__host__ __device__ constexpr int gemv_quant_eights(int eights) { return eights ? eights : 1; }
__host__ __device__ constexpr int gemv_quant_rows(int eights) { return eights ? 8 * eights : 4; }
/// Runs of 256 values a warp may hold.
inline constexpr int kGemvQuantRuns = 4;
/// The longest x.
__host__ __device__ constexpr int gemv_quant_most(int warps) {
  return 256 * kGemvQuantRuns * warps;
}
inline constexpr int kGemvQuantStages = 3;
/// A warp's sums of two turns; its digits pass through here before.
__host__ __device__ constexpr int gemv_quant_sums(int rows) {
  return 2 * rows * 32 < 1664 ? 1664 : 2 * rows * 32;
}

/// x of this lane's columns: 32 bytes of digits of each run and their worth.
template <int kBits>
struct GemvHeldDigits {
  static constexpr int kSteps = kBits == 8 ? 2 : 1;  // of 128 bytes of w, in a run
  uint4 x[kGemvQuantRuns][2];
  float worth[kGemvQuantRuns][kSteps];
};

/// Run r of this warp: values [(r * warps + warp) * 256, + 256).
template <int kWarps>
__device__ __forceinline__ int gemv_quant_run(int r) {
  return r * kWarps + uniform_warp();
}

/// The norm's weights where this lane's x are; a constant, so they may come before x.
template <int kWarps>
__device__ __forceinline__ void gemv_quant_norm(const GemvArgs& p, const GemvGroupArgs& g,
                                                uint4 (&out)[kGemvQuantRuns]) {
  if (g.norm == nullptr) return;
  const auto* weight = static_cast<const uint4*>(g.norm);
#pragma unroll
  for (int r = 0; r < kGemvQuantRuns; ++r) {
    const int i = gemv_quant_run<kWarps>(r) * 32 + threadIdx.x % 32;
    out[r] = i < p.k / 8 ? __ldg(weight + i) : uint4{0, 0, 0, 0};
  }
}

/// Adds the squares of this lane's x, where a group normalises it; norm: gemv_quant_norm.
template <class T, int kBits, int kWarps, class Group>
__device__ __forceinline__ bool gemv_quant_digits(const GemvArgs& p, const Group& q,
                                                  const uint4 (&norm)[kGemvQuantRuns],
                                                  float& squares, unsigned char* scratch,
                                                  GemvHeldDigits<kBits>& held) {
  constexpr int kPlanes = 8 / kBits, kGroup = 8 * kPlanes, kSteps = GemvHeldDigits<kBits>::kSteps;
  const int lane = threadIdx.x % 32, segment = lane / 4 % 2, digit = lane / 8, t = lane % 4;
  const auto* x = static_cast<const uint4*>(p.x);
  uint4 v[kGemvQuantRuns];
#pragma unroll
  for (int r = 0; r < kGemvQuantRuns; ++r) {  // past the L1 cache: a kernel may still run beside
    const int i = gemv_quant_run<kWarps>(r) * 32 + lane;
    v[r] = i < p.k / 8 ? __ldcg(x + i) : uint4{0, 0, 0, 0};
  }
  if constexpr (kGemvGroup<Group>) {
    if (q.group.norm != nullptr) {
#pragma unroll
      for (int r = 0; r < kGemvQuantRuns; ++r) {
        if (gemv_quant_run<kWarps>(r) * 256 >= p.k) break;
        v[r] = gemv_normed<T>(q.group, v[r], norm[r], squares);
      }
    }
  }
  bool bad = false;
#pragma unroll
  for (int first = 0; first < kGemvQuantRuns; first += 2) {  // two at a time: chains of shuffles
    if (gemv_quant_run<kWarps>(first) * 256 >= p.k) break;
    std::uint32_t word[2][3][2];
    float2 of_segment[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      bad |= gemv_cut<T, kBits>(v[first + i], word[i], of_segment[i]);
    }
    const int unit = lane / (2 * kPlanes), part = lane % (2 * kPlanes);
    const int to = (unit / 8 * kPlanes + part / 2) * 384 + unit % 8 * 16 + part % 2 * 8;
    auto* scales = reinterpret_cast<float2*>(scratch + 768);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int d = 0; d < 3; ++d) {
        *reinterpret_cast<uint2*>(scratch + i * 832 + to + d * 128) =
            make_uint2(word[i][d][0], word[i][d][1]);
      }
      if (lane % kGroup == 0) scales[i * 104 + lane / kGroup] = of_segment[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {  // the fourth digit's columns are zeros
        const unsigned char* from = scratch + i * 832 + j * 384 + digit * 128 + lane % 8 * 16;
        held.x[first + i][j] = digit < 3 ? shared_16(from) : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        const float2 s = scales[i * 104 + j * 2 + segment];
        const float power = t == 0 ? 65536.0f : t == 1 ? 256.0f : 1.0f;
        held.worth[first + i][j] = t == 3 ? s.y : s.x * power;
      }
    }
    __syncwarp();
  }
  return bad;
}

/// Asks for a stage's rows and scales; called by a warp, all of whose lanes arrive. In a stage the
/// scales of a group of columns are eights, of rows as they lie there.
template <class T, int kRows, class Group>
__device__ __forceinline__ void gemv_quant_ask(const GemvArgs& p, const Group& q, std::uint32_t bar,
                                               std::uint32_t stage, int row0) {
  constexpr int kUnits = (kRows + 7) / 8;
  const int have = min(kRows, p.n - row0), units = ((p.k - 1 >> p.group_shift) + 1) * kUnits;
  const int lane = threadIdx.x % 32;
  const std::uint32_t to = stage + p.scales_at;
  if constexpr (kGemvGroup<Group>) {
    static_assert(kRows >= 8);
    const GemvGroupArgs& g = q.group;
    const bool gated = g.gated != 0;
    const int part = gated ? 0 : gemv_part(g, row0);
    const int row = gated ? row0 / 2 : row0 - g.first[part];
    const std::int64_t pitch = gemv_part_rows(p, g, part);
    if (elect_lane()) gemv_group_ask<kRows>(p, g, bar, stage, row0, have);
    const T *first = static_cast<const T*>(q.scales[part]) + row,
            *second = static_cast<const T*>(q.scales[1]) + row;
#pragma unroll 1
    for (int i = lane; i < units; i += 32) {
      const int unit = i % kUnits;
      const std::int64_t at = i / kUnits * pitch;
      if (!gated) {
        if (unit * 8 < have) copy_16_async(to + i * 16, first + at + unit * 8, true);
      } else if constexpr (kUnits == 2) {
        copy_16_async(to + i * 16, (unit == 0 ? first : second) + at, true);
      } else {
        copy_8_async(to + i * 16, first + at);
        copy_8_async(to + i * 16 + 8, second + at);
      }
    }
  } else {
    if (elect_lane()) {
      const char* w = static_cast<const char*>(p.w) + row0 * p.w_pitch;
      barrier_expect(bar, have * p.row_bytes);
      const int copies = p.together ? 1 : have;
      const int each = p.together ? have * p.row_bytes : p.row_bytes;
#pragma unroll 1
      for (int r = 0; r < copies; ++r, w += p.w_pitch) {
        bulk_copy(stage + r * p.row_bytes, w, each, bar);
      }
    }
    // four rows take the scales of the eight that they belong to
    row0 &= ~7;
#pragma unroll 1
    for (int i = lane; i < units; i += 32) {
      const int row = row0 + i % kUnits * 8;
      if (row < p.n) {
        copy_16_async(to + i * 16,
                      static_cast<const T*>(p.scales) + i / kUnits * p.scales_pitch + row, true);
      }
    }
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

/// This warp's sums over its columns of a stage that has arrived.
template <class T, int kBits, int kEights, int kWarps>
__device__ __forceinline__ void gemv_quant_sum(const GemvArgs& p, const unsigned char* stage,
                                               int row0, const GemvHeldDigits<kBits>& held,
                                               float (&sum)[gemv_quant_eights(kEights)][2]) {
  constexpr int kVectors = 8 / kBits, kSteps = GemvHeldDigits<kBits>::kSteps;
  const int lane = threadIdx.x % 32, segment = lane / 4 % 2, row = lane / 8;
  // the fourth digit's products are zeros: its lanes add their worth, -8 sum(x), once
  const float base = lane % 4 == 3 ? kSumBaseValue - 1.0f : kSumBaseValue;
  constexpr int kEach = gemv_quant_eights(kEights);
  const T* scales = reinterpret_cast<const T*>(stage + p.scales_at) + row;
  if constexpr (kEights == 0) scales += row0 & 4;
  const unsigned char* w = stage + row * p.row_bytes + lane % 8 * 16;
#pragma unroll
  for (int r = 0; r < kGemvQuantRuns; ++r) {
    const int run = gemv_quant_run<kWarps>(r);
    if (run * 256 >= p.k) break;
#pragma unroll
    for (int j = 0; j < kSteps; ++j) {
      const int step = run * kSteps + j;
      const int k = min((step * 2 + segment) * 64 * kVectors, p.k - 1);
      const T* of_group = scales + (k >> p.group_shift) * (8 * kEach);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        uint4 a[kVectors], b[kVectors], xs[kVectors];
        const unsigned char* from = w + step * 128 + e * 8 * p.row_bytes;
        gemv_bytes_16<kBits>(a, shared_16(from));
        gemv_bytes_16<kBits>(b, kEights ? shared_16(from + 4 * p.row_bytes) : uint4{0, 0, 0, 0});
#pragma unroll
        for (int i = 0; i < kVectors; ++i) xs[i] = held.x[r][kBits == 8 ? j : i];
        int c[4];
        gemv_digit_16<kBits>(c, a, b, xs);
#pragma unroll
        for (int i = 0; i < (kEights ? 2 : 1); ++i) {
          const float v = __int_as_float(segment ? c[2 * i + 1] : c[2 * i]) - base;
          sum[e][i] += v * held.worth[r][j] * to_float(of_group[e * 8 + 4 * i]);
        }
      }
    }
  }
}

/// The elements of a turn's rows, from all warps' sums.
template <class T, int kRows, int kWarps>
__device__ __forceinline__ void gemv_quant_finish(const GemvArgs& p, const unsigned char* all,
                                                  int row0, float residual) {
  const int i = threadIdx.x, n = row0 + i / 8;
  if (i >= kRows * 8) return;
  float v = 0.0f;
#pragma unroll
  for (int k = 0; k < kWarps; ++k) {
    v += reinterpret_cast<const float*>(all + k * gemv_quant_sums(kRows))[i];
  }
#pragma unroll
  for (int k = 1; k < 8; k <<= 1) v += __shfl_xor_sync(0xffffffffu, v, k);
  if (i % 8 != 0 || n >= p.n) return;
  v = gemv_value<T>(p, v, 0, n, residual);
  static_cast<T*>(p.y)[n] = from_float<T>(v);
}

/// x holds NaN or Inf: this block's rows by plain arithmetic.
template <class T, int kRows, class Group>
__device__ __noinline__ void gemv_quant_plain(const GemvArgs& p, const Group& q, int row0,
                                              int step) {
  if constexpr (kGemvGroup<Group>) {
    const int share = q.group.gated ? 2 : 1;  // rows of w an element
    for (; row0 < p.n; row0 += step) {
      const int end = min(row0 + kRows, p.n) / share;
      for (int i = row0 / share + static_cast<int>(threadIdx.x) / 32; i < end; i += blockDim.x / 32) {
        gemv_group_element<T>(p, q, i);
      }
    }
  } else {
    gemv_plain<T>(p, row0, kRows, step);
  }
}

template <class T, int kBits, int kEights, int kWarps, class Group>
__device__ __forceinline__ void gemv_quant_block(const GemvArgs& p, const Group& q) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int kRows = gemv_quant_rows(kEights), kSums = gemv_quant_sums(kRows);
  const int warp = uniform_warp(), lane = threadIdx.x % 32, step = gridDim.x * kRows;
  const std::uint32_t base = shared_address(memory);
  const auto ask = [&](int stage, int row) {
    gemv_quant_ask<T, kRows>(p, q, base + 8 * stage, base + p.stages_at + stage * p.stage_bytes,
                             row);
  };
  int row0 = blockIdx.x * kRows;
  if (warp < p.stages) {  // a stage each warp: asking takes long
    if (elect_lane()) {
      barrier_init(base + 8 * warp, 1 + 32);
      barrier_init_done();
    }
    __syncwarp();
    if (row0 + warp * step < p.n) ask(warp, row0 + warp * step);
  }
  launch_dependents();
  uint4 norm[kGemvQuantRuns];
  if constexpr (kGemvGroup<Group>) gemv_quant_norm<kWarps>(p, q.group, norm);
  wait_for_previous();  // x is written by the kernel before
  unsigned char* all = memory + 128;
  GemvHeldDigits<kBits> held;
  float squares = 0.0f;
  const bool bad =
      gemv_quant_digits<T, kBits, kWarps>(p, q, norm, squares, all + warp * kSums, held);
  if constexpr (kGemvGroup<Group>) {
    if (q.group.norm != nullptr) {
      squares = warp_reduce<Sum>(squares);
      if (lane == 0) gemv_squares(memory)[warp] = squares;
    }
  }
  if (__syncthreads_or(bad)) {
    for (int i = 0; i < p.stages && row0 + i * step < p.n; ++i) barrier_wait(base + 8 * i, 0);
    gemv_quant_plain<T, kRows>(p, q, row0, step);
    return;
  }
  int stage = 0, parity = 0;
  for (int turn = 0;; ++turn) {
    float sum[gemv_quant_eights(kEights)][2] = {};
    float residual = 0.0f;
    if constexpr (!kGemvGroup<Group>) residual = gemv_residual<T, 8>(p, row0, kRows);
    barrier_wait(base + 8 * stage, parity);
    gemv_quant_sum<T, kBits, kEights, kWarps>(p, memory + p.stages_at + stage * p.stage_bytes, row0,
                                              held, sum);
    unsigned char* buffer = all + turn % 2 * kRows * 32;
    auto* to = reinterpret_cast<float*>(buffer + warp * kSums) + lane;
#pragma unroll
    for (int e = 0; e < gemv_quant_eights(kEights); ++e) {
      to[e * 64] = sum[e][0];
      if (kEights > 0) to[e * 64 + 32] = sum[e][1];
    }
    __syncthreads();
    const int ahead = row0 + p.stages * step;
    if (warp == stage && ahead < p.n) ask(stage, ahead);
    if constexpr (kGemvGroup<Group>) {
      gemv_group_finish<T, kRows, kWarps>(p, q.group, gemv_squares(memory),
                                          reinterpret_cast<const float*>(buffer), kSums / 4, row0,
                                          min(kRows, p.n - row0));
    } else {
      gemv_quant_finish<T, kRows, kWarps>(p, buffer, row0, residual);
    }
    row0 += step;
    if (row0 >= p.n) break;
    if (++stage == p.stages) stage = 0, parity ^= 1;
  }
}

template <class T, int kBits, int kEights, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 16 / kWarps)
    gemv_quant(const __grid_constant__ GemvArgs p) {
#if __CUDA_ARCH__ >= 900
  gemv_quant_block<T, kBits, kEights, kWarps>(p, GemvAlone{});
#else
  __trap();  // why_not keeps older architectures away
#endif
}

template <class T, int kBits, int kEights, int kWarps>
__global__ void __launch_bounds__(32 * kWarps, 16 / kWarps)
    gemv_group_quant(const __grid_constant__ GemvArgs p,
                     const __grid_constant__ GemvQuantGroupArgs q) {
#if __CUDA_ARCH__ >= 900
  gemv_quant_block<T, kBits, kEights, kWarps>(p, q);
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
