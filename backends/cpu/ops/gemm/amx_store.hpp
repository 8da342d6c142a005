// The ends of bf16 products on matrix tiles, inside AMX sources: as epilogue.hpp's, two vectors of sums
// rounded to a line of bf16 in one instruction, SiLU and sigmoid without a division.
#pragma once

#include <immintrin.h>

#include "ops/gemm/epilogue.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

/// 1 / (1 + e^-x) within about 2^-22 of itself: a step of Newton's behind 14 bits takes a third of a division's
/// time. 0 where e^-x is infinite.
RM_INLINE vf sigmoid_narrow(vf x) {
  // Bounds keep infinities from becoming NaN; NaN passes, since a comparison with it picks the second.
  const __m512 low = (__m512)vset(-200.0f), high = (__m512)vset(200.0f);
  const vf y = (vf)_mm512_max_ps(low, _mm512_min_ps(high, (__m512)(x * -1.44269504f)));
  const vf n = (vf)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const vf f = y - n;
  vf p = vset(0.00132647227f);
  p = p * f + 0.00967151299f;
  p = p * f + 0.0555073359f;
  p = p * f + 0.240222424f;
  p = p * f + 0.693147004f;
  p = p * f + 1.0f;
  const __m512 d = (__m512)((vf)_mm512_scalef_ps((__m512)p, (__m512)n) + 1.0f);
  const __m512 r = _mm512_rcp14_ps(d);
  const __m512 error = _mm512_fnmadd_ps(d, r, (__m512)vset(1.0f));
  const __mmask16 finite = _mm512_cmp_ps_mask(error, error, _CMP_ORD_Q);  // not infinity times zero
  return (vf)_mm512_mask3_fmadd_ps(error, r, r, finite);
}

template <int A>
RM_INLINE vf activate_narrow(vf x) {
  if constexpr (A == kSilu) return x * sigmoid_narrow(x);
  if constexpr (A == kSigmoid) return sigmoid_narrow(x);
  return activate<A>(x);
}

/// Numbers below 2^-126 become zero.
RM_INLINE __m512i round_pair(vf low, vf high) {
  return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
}

template <int A>
RM_INLINE __m512i finish_row(const float* acc, float alpha, const uint16_t* bias,
                             const uint16_t* residual) {
  vf x[2];
#pragma GCC unroll 2
  for (int j = 0; j < 2; ++j) {
    x[j] = F32::load(acc + j * kWidth) * alpha;
    if (bias) x[j] += BF16::load(bias + j * kWidth);
    x[j] = activate_narrow<A>(x[j]);
    if (residual) x[j] += BF16::load(residual + j * kWidth);
  }
  return round_pair(x[0], x[1]);
}

template <int A>
void store_narrow(const StoreArgs& args) {
  const auto* bias = static_cast<const uint16_t*>(args.bias);
  const auto* residual = static_cast<const uint16_t*>(args.residual);
  auto* c = static_cast<uint16_t*>(args.c);
  if (args.cols == kNr) {
    for (int64_t i = 0; i < args.rows; ++i) {
      _mm512_storeu_si512(c + i * args.c_stride,
                          finish_row<A>(args.acc + i * kNr, args.alpha, bias,
                                        residual ? residual + i * args.residual_stride : nullptr));
    }
    return;
  }
  // The ragged last chunk: the same arithmetic on lines of which the front is there.
  const auto some = static_cast<__mmask32>((uint64_t{1} << args.cols) - 1);
  alignas(64) uint16_t bias_row[kNr], residual_row[kNr];
  if (bias) _mm512_store_si512(bias_row, _mm512_maskz_loadu_epi16(some, bias));
  for (int64_t i = 0; i < args.rows; ++i) {
    if (residual) {
      _mm512_store_si512(residual_row, _mm512_maskz_loadu_epi16(some, residual + i * args.residual_stride));
    }
    _mm512_mask_storeu_epi16(c + i * args.c_stride, some,
                             finish_row<A>(args.acc + i * kNr, args.alpha, bias ? bias_row : nullptr,
                                           residual ? residual_row : nullptr));
  }
}

template <int A>
constexpr void fill_narrow(StoreFn* row) {
  row[A] = store_narrow<A>;
  if constexpr (A > 0) fill_narrow<A - 1>(row);
}

}  // namespace
}  // namespace rm::cpu::gemm::RM_ISA
