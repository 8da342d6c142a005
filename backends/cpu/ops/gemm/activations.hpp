// Activations on vectors, within ~2 ulp (gelu in the relative sense down to its far negative tail).
//
// Coefficients: weighted minimax fits made for this file (exp on |r| <= ln2/2, Phi in
// t = 1 / (1 + 0.27 |x|) on |x| <= 14, tanh on |x| <= 0.625).
#pragma once

#include "ops/gemm/simd.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer

RM_INLINE Vec min_keep_nan(Vec x, float limit) { return (x > limit) ? splat(limit) : x; }
RM_INLINE Vec max_keep_nan(Vec x, float limit) { return (x < limit) ? splat(limit) : x; }

/// e^(r) 2^n, the parts of e^(x + low) for |low| < 0.01 and |x| < 110; `n` comes as the bits of
/// n + kRound.
RM_INLINE Vec exp_parts(Vec x, Vec low, Ints& n) {
  const Vec shifted = x * 1.44269504f + kRound;
  const Vec whole = shifted - kRound;
  Vec r = x - whole * 0.693359375f;  // exact: 9 bits of ln2 times a small integer
  r = r + whole * 2.12194440e-4f + low;
  const Vec p =
      (((r * 0.00139505f + 0.00836888f) * r + 0.04166621f) * r + 0.16666519f) * r + 0.50000001f;
  n = (Ints)shifted - (Ints)splat(kRound);
  return r * r * p + r + 1.f;
}

/// e^x; 0 below -104, +inf above 88.73, NaN for NaN.
RM_INLINE Vec exp_vec(Vec x) {
  const Vec clamped = max_keep_nan(min_keep_nan(x, 89.f), -104.f);
  Ints n;
  const Vec e = exp_parts(clamped, Vec{}, n);
  // 2^n in two factors: n reaches 128 and, for subnormal results, -150.
  const Ints half = n >> 1;
  const Vec s0 = (Vec)((half + 127) << 23), s1 = (Vec)((n - half + 127) << 23);
  return (x != x) ? x : e * s0 * s1;
}

/// x * Phi(x), Phi by its scaled complement: no cancellation in the negative tail. 0 below -13.2,
/// where the product leaves the normal range.
RM_INLINE Vec gelu_vec(Vec x) {
  const Vec ax = (Vec)((Bits)x & 0x7fffffff);
  const Vec ac = min_keep_nan(ax, 13.2f);
  const Vec t = 1.f / (ac * 0.27f + 1.f);
  Vec p = t * 0.02893530634f - 0.12635613003f;
  p = p * t + 0.1695079601f;
  p = p * t - 0.06887931268f;
  p = p * t + 0.1075862572f;
  p = p * t + 0.07215663159f;
  p = p * t + 0.1017817585f;
  p = p * t + 0.1075471502f;
  p = p * t + 0.1077203905f;
  p = p * t;
  const Vec sq = ac * ac;
  Ints n;
  const Vec e = exp_parts(sq * -0.5f, square_error(ac, sq) * -0.5f, n);
  const Vec scale = (Vec)((n + 127) << 23);
  const Vec tail = (ax > 13.2f) ? Vec{} : p * e;
  return (x < 0.f) ? x * tail * scale : x * (1.f - tail * scale);
}

RM_INLINE Vec tanh_vec(Vec x) {
  const Vec ax = (Vec)((Bits)x & 0x7fffffff);
  const Bits sign = (Bits)x & 0x80000000;
  const Vec s = x * x;
  const Vec q =
      (((s * -0.00571701f + 0.02065056f) * s - 0.05374349f) * s + 0.13331491f) * s - 0.33333284f;
  const Vec near = x * s * q + x;
  const Vec e = exp_vec(min_keep_nan(ax, 10.f) * 2.f);
  const Vec far = (Vec)((Bits)(1.f - 2.f / (e + 1.f)) | sign);
  return (ax < 0.625f) ? near : (x != x) ? x : far;
}

RM_INLINE Vec sigmoid_vec(Vec x) { return 1.f / (exp_vec(-x) + 1.f); }

/// 0.5 x (1 + tanh(u)) = x sigmoid(2u): no cancellation for negative x. u stops where the
/// sigmoid is 0 or 1, so that inf * 0 cannot arise but for x itself.
RM_INLINE Vec gelu_tanh_vec(Vec x) {
  const Vec ac = max_keep_nan(min_keep_nan(x, 20.f), -20.f);
  const Vec u2 = ac * (ac * ac * 0.0713548163f + 1.59576912f);
  return x * sigmoid_vec(u2);
}

template <int A>
RM_INLINE Vec activate(Vec x) {
  if constexpr (A == kRelu) return (x < 0.f) ? Vec{} : x;
  if constexpr (A == kGelu) return gelu_vec(x);
  if constexpr (A == kGeluTanh) return gelu_tanh_vec(x);
  if constexpr (A == kSilu) return x * sigmoid_vec(x);
  if constexpr (A == kTanh) return tanh_vec(x);
  if constexpr (A == kSigmoid) return sigmoid_vec(x);
  return x;
}

}  // namespace
}  // namespace rm::cpu::gemm::RM_ISA
