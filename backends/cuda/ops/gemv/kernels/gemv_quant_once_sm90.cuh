// int8 and int4 weights that as many blocks as run at once read in one turn, against one row of 16-bit
// x. They are in registers before x is asked for and are widened while it comes, so that behind it are
// products of 16 bits and the sums alone; cutting x into digits first (gemv_quant_sm90) takes longer
// than so few products. A product's 16 rows are two rows of w in eight segments of 32 values, its
// columns the segments of x; only where the two agree is the result of use, and there a segment's scale
// multiplies it. For K <= 2048.
#pragma once

#include "gemv/kernels/gemv_quant_sm90.cuh"
#include "gemv/kernels/gemv_unpack_sm90.cuh"

namespace rm::cuda_ops {

inline constexpr int kGemvQuantOnceWarps = 8, kGemvQuantOnceRows = 16;
/// The longest x: 256 values a warp.
inline constexpr int kGemvQuantOnceMost = 256 * kGemvQuantOnceWarps;

template <class T, int kBits, class Group>
__device__ __forceinline__ void gemv_quant_once_block(const GemvArgs& p, const Group& q) {
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int kRows = kGemvQuantOnceRows, kPairs = kRows / 2;
  constexpr int kSums = gemv_quant_sums(kRows), kWarps = kGemvQuantOnceWarps;
  using Unpack = GemvUnpack<T, kBits>;
  const int warp = uniform_warp(), lane = threadIdx.x % 32, segment = lane / 4;
  const std::uint32_t bar = shared_address(memory);
  const int row0 = blockIdx.x * kRows;
  if (warp == 0) {
    if (elect_lane()) {
      barrier_init(bar, 1 + 32);
      barrier_init_done();
    }
    __syncwarp();
    gemv_quant_ask<T, kRows>(p, q, bar, bar + p.stages_at, row0);
  }
  launch_dependents();
  __syncthreads();
  const int at = warp * 256 + lane * 8;
  const bool inside = at < p.k;
  uint4 weight{0, 0, 0, 0};
  if constexpr (kGemvGroup<Group>) {
    if (q.group.norm != nullptr && inside) {
      weight = __ldg(static_cast<const uint4*>(q.group.norm) + at / 8);
    }
  }
  barrier_wait(bar, 0);
  // What lies behind a row, or a row that is not there, are some integers: x is zero, or nobody asks.
  const unsigned char* stage = memory + p.stages_at;
  std::uint32_t w[kRows][4];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    std::uint32_t words[kBits / 4];
    memcpy(words, __builtin_assume_aligned(stage + r * p.row_bytes + at * kBits / 8, kBits), kBits);
    Unpack::eight(words, w[r]);
  }
  const int group = min(warp * 256 + segment * 32, p.k - 1) >> p.group_shift;
  Pack<T, 8> scales[2];
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    scales[e] = *reinterpret_cast<const Pack<T, 8>*>(stage + p.scales_at + (group * 2 + e) * 16);
  }
  float sum[kPairs][4] = {}, residual = 0.0f;
  int once = p.m;  // m is 1
  // A loop, for the compiler moves arithmetic to its use, behind any wait, but not into a loop.
#pragma unroll 1
  do {
    wait_for_previous();  // x is written by the kernel before
    if constexpr (!kGemvGroup<Group>) residual = gemv_residual<T, 8>(p, row0, kRows);
    uint4 x[1] = {{0, 0, 0, 0}};
    if (inside) x[0] = __ldcg(static_cast<const uint4*>(p.x) + at / 8);
    if constexpr (kGemvGroup<Group>) {
      if (q.group.norm != nullptr) {
        float squares = 0.0f;
        if (inside) x[0] = gemv_normed<T>(q.group, x[0], weight, squares);
        squares = warp_reduce<Sum>(squares);
        if (lane == 0) gemv_squares(memory)[warp] = squares;
      }
    }
    std::uint32_t xs[4];
    gemv_x<kBits>(x, xs);
#pragma unroll
    for (int half = 0; half < 4; half += 2) {
#pragma unroll
      for (int r = 0; r < kPairs; ++r) {
        const std::uint32_t(&a)[4] = w[2 * r], (&b)[4] = w[2 * r + 1];
        mma_16816<T>(sum[r], a[half], b[half], a[half + 1], b[half + 1], xs[half], xs[half + 1]);
      }
    }
  } while (--once > 0);
  // [row][segment], by the lanes whose column is their segment
  unsigned char* all = memory + 128;
  auto* to = reinterpret_cast<float*>(all + warp * kSums) + segment;
  if (lane % 4 == segment / 2) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float(&of)[4] = sum[r / 2];
      const float v = segment % 2 ? of[r % 2 * 2 + 1] : of[r % 2 * 2];
      to[r * 8] = v * to_float(scales[r / 8].v[r % 8]);
    }
  }
  __syncthreads();
  if constexpr (kGemvGroup<Group>) {
    gemv_group_finish<T, kRows, kWarps>(p, q.group, gemv_squares(memory),
                                        reinterpret_cast<const float*>(all), kSums / 4, row0,
                                        min(kRows, p.n - row0));
  } else {
    gemv_quant_finish<T, kRows, kWarps>(p, all, row0, residual);
  }
}

template <class T, int kBits>
__global__ void __launch_bounds__(32 * kGemvQuantOnceWarps, 2)
    gemv_quant_once(const __grid_constant__ GemvArgs p) {
#if __CUDA_ARCH__ >= 900
  gemv_quant_once_block<T, kBits>(p, GemvAlone{});
#else
  __trap();  // why_not keeps older architectures away
#endif
}

template <class T, int kBits>
__global__ void __launch_bounds__(32 * kGemvQuantOnceWarps, 2)
    gemv_group_quant_once(const __grid_constant__ GemvArgs p,
                          const __grid_constant__ GemvQuantGroupArgs q) {
#if __CUDA_ARCH__ >= 900
  gemv_quant_once_block<T, kBits>(p, q);
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
