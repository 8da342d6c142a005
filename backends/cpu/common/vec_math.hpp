// exp, log, tanh, erf, sin, cos and the activations on vectors of f32.
//
// Errors stay within 2-4 ulp over the whole range (tests/cpp/cpu_ops/ewise_math_test.cpp measures
// them); NaN and Inf follow IEEE.  The polynomials are weighted minimax fits made for this file.
#pragma once

#include "common/vec.hpp"

namespace rm::cpu::RM_ISA {

// Adding and subtracting 1.5 * 2^23 rounds to an integer, which then sits in the low bits.
constexpr float kRoundMagic = 12582912.0f;
constexpr int32_t kRoundMagicBits = 0x4b400000;

/// e^r for |r| <= ln(2)/2.
RM_INLINE vf exp_small(vf r) {
  vf p = vset(0.00138131424f);
  p = p * r + 0.00836941904f;
  p = p * r + 0.0416684568f;
  p = p * r + 0.166665148f;
  p = p * r + 0.499999931f;
  return p * (r * r) + r + 1.0f;
}

struct ExpParts {
  vi n;
  vf mantissa;
};
struct ExpArgument {
  vi n;
  vf r;  // x = n ln(2) + r
};
RM_INLINE ExpArgument exp_argument(vf x) {
  const vf t = x * 1.44269504f + kRoundMagic;
  const vf n = t - kRoundMagic;
  return {as_int(t) - kRoundMagicBits, (x - n * 0.693359375f) + n * 2.12194440e-4f};
}
RM_INLINE ExpParts exp_parts(vf x) {
  const ExpArgument a = exp_argument(x);
  return {a.n, exp_small(a.r)};
}
/// Of e^(x + low), |low| < 0.01.
RM_INLINE ExpParts exp_parts(vf x, vf low) {
  const ExpArgument a = exp_argument(x);
  return {a.n, exp_small(a.r + low)};
}

RM_INLINE vf vexp(vf x) {
  x = x > 89.0f ? vset(89.0f) : x;
  x = x < -104.0f ? vset(-104.0f) : x;
  const ExpParts e = exp_parts(x);
  // Two halves of the scale, so that results near overflow and subnormal ones come out right.
  const vi half = e.n >> 1;
  return e.mantissa * as_float((half + 127) << 23) * as_float((e.n - half + 127) << 23);
}

/// For softmax: x <= 0 or NaN; results below 2^-126 are zero.
RM_INLINE vf vexp_nonpositive(vf x) {
  const vf y = x < -87.0f ? vset(-87.0f) : x;
  const ExpParts e = exp_parts(y);
  const vf r = e.mantissa * as_float((e.n + 127) << 23);
  return x < -87.0f ? vf{} : r;
}

/// log(1 + f) + n log(2) for 1 + f in [sqrt(1/2), sqrt(2)).
RM_INLINE vf log_of_mantissa(vf f, vf n) {
  vf p = vset(0.0674659182f);
  p = p * f - 0.116756388f;
  p = p * f + 0.118881776f;
  p = p * f - 0.12405592f;
  p = p * f + 0.142195506f;
  p = p * f - 0.166679956f;
  p = p * f + 0.200021188f;
  p = p * f - 0.250000096f;
  p = p * f + 0.333333126f;
  const vf f2 = f * f;
  vf y = f * f2 * p + n * -2.12194440e-4f;
  y = y - 0.5f * f2;
  return (y + f) + n * 0.693359375f;
}

RM_INLINE vf vlog(vf x) {
  const vi subnormal = x < 1.17549435e-38f;
  const vf scaled = subnormal ? x * 8388608.0f : x;
  // sqrt(1/2): mantissas in [sqrt(1/2), sqrt(2)); unsigned, because NaN may wrap.
  const vi bits = reinterpret_cast<vi>(reinterpret_cast<vu>(scaled) - 0x3f3504f3u);
  const vi e = (bits >> 23) + (subnormal ? vi{} - 23 : vi{});
  const vf f = as_float((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
  vf y = log_of_mantissa(f, __builtin_convertvector(e, vf));
  const float inf = __builtin_inff();
  y = x == inf ? x : y;
  y = x == 0.0f ? vset(-inf) : y;
  return (x < 0.0f) | (x != x) ? vset(__builtin_nanf("")) : y;
}

/// Whether any lane of a comparison holds.
RM_INLINE bool any_lane(vi mask) {
#if RM_ISA_LEVEL >= 2
  return _mm512_movepi32_mask(reinterpret_cast<__m512i>(mask)) != 0;
#elif RM_ISA_LEVEL == 1
  return _mm256_movemask_ps(reinterpret_cast<__m256>(mask)) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

RM_INLINE vf vtanh(vf x) {
  const vf a = vabs(x), s = x * x;
  vf p = vset(0.00214753687f);
  p = p * s - 0.00818267387f;
  p = p * s + 0.0217029671f;
  p = p * s - 0.0539472043f;
  p = p * s + 0.133332098f;
  p = p * s - 0.333333309f;
  const vf small = p * s * x + x;
  const vf capped = a > 10.0f ? vset(10.0f) : a;  // keeps NaN
  const ExpParts e = exp_parts(capped * 2.0f);
  const vf large = 1.0f - 2.0f / (e.mantissa * as_float((e.n + 127) << 23) + 1.0f);
  return vcopysign(a < 0.625f ? small : large, x);  // of -0, too
}

RM_INLINE vf verf(vf x) {
  const vf t = vabs(x), s = x * x;
  vf p = vset(8.34522119e-05f);
  p = p * s - 0.000813743652f;
  p = p * s + 0.00520063419f;
  p = p * s - 0.0268592707f;
  p = p * s + 0.112836939f;
  p = p * s - 0.376126337f;
  p = p * s + 0.128379167f;
  const vf small = p * x + x;
  const vf u = t > 4.0f ? vset(4.0f) : t;  // erf(4) rounds to 1
  vf q = vset(-1.12314655e-05f);
  q = q * u + 0.000322805392f;
  q = q * u - 0.00364246502f;
  q = q * u + 0.0237620751f;
  q = q * u - 0.106236891f;
  q = q * u - 0.635151309f;
  q = q * u - 0.12864849f;
  const ExpParts e = exp_parts(q * u - u);
  const vf large = vcopysign(1.0f - e.mantissa * as_float((e.n + 127) << 23), x);
  return t < 0.927734375f ? small : (x != x) ? x : large;
}

RM_INLINE vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }
RM_INLINE vf vsilu(vf x) { return x / (1.0f + vexp(-x)); }

/// x^2 - square, exactly, where `square` is x^2 rounded.
RM_INLINE vf square_error(vf x, vf square) {
#if RM_ISA_LEVEL >= 2
  return reinterpret_cast<vf>(_mm512_fmsub_ps(reinterpret_cast<__m512>(x),
                                              reinterpret_cast<__m512>(x),
                                              reinterpret_cast<__m512>(square)));
#elif RM_ISA_LEVEL == 1
  return reinterpret_cast<vf>(_mm256_fmsub_ps(reinterpret_cast<__m256>(x),
                                              reinterpret_cast<__m256>(x),
                                              reinterpret_cast<__m256>(square)));
#else
  const vf high = as_float(as_int(x) & static_cast<int32_t>(0xfffff000));  // 12 bits: exact products
  const vf low = x - high;
  return ((high * high - square) + 2.0f * high * low) + low * low;
#endif
}

/// p m s = Phi(-|x|) and m s = exp(-x^2 / 2): Phi by its scaled complement p, a minimax fit in
/// 1 / (1 + 0.27 |x|) for |x| <= 14. m is 0 beyond 13.2, where m s is below 2^-125.
struct NormalParts {
  vf p, m, s;
};
RM_INLINE NormalParts normal_parts(vf x) {
  const vf a = vabs(x);
  const vf capped = a > 13.2f ? vset(13.2f) : a;  // keeps NaN
  const vf t = 1.0f / (capped * 0.27f + 1.0f);
  vf p = t * 0.02893530634f - 0.12635613003f;
  p = p * t + 0.1695079601f;
  p = p * t - 0.06887931268f;
  p = p * t + 0.1075862572f;
  p = p * t + 0.07215663159f;
  p = p * t + 0.1017817585f;
  p = p * t + 0.1075471502f;
  p = p * t + 0.1077203905f;
  p = p * t;
  const vf square = capped * capped;
  const ExpParts e = exp_parts(square * -0.5f, square_error(capped, square) * -0.5f);
  return {p, a > 13.2f ? vf{} : e.mantissa, as_float((e.n + 127) << 23)};
}

/// x * Phi(x): no cancellation in the negative tail. 0 below -13.2, where the product is subnormal.
RM_INLINE vf vgelu(vf x) {
  const NormalParts n = normal_parts(x);
  const vf tail = n.p * n.m;
  return x < 0.0f ? x * tail * n.s : x * (1.0f - tail * n.s);
}

/// The derivative of it: Phi(x) + x phi(x).
RM_INLINE vf vgelu_slope(vf x) {
  const NormalParts n = normal_parts(x);
  const vf bell = n.m * n.s, tail = n.p * bell;
  return (x < 0.0f ? tail : 1.0f - tail) + x * bell * 0.398942280f;
}

/// 0.5 x (1 + tanh(u)) = x sigmoid(2u): no cancellation for negative x. u stops where the sigmoid is
/// 0 or 1, so that inf * 0 arises for x = -inf alone.
RM_INLINE vf vgelu_tanh(vf x) {
  vf capped = x > 20.0f ? vset(20.0f) : x;
  capped = capped < -20.0f ? vset(-20.0f) : capped;
  return x * vsigmoid(capped * (capped * capped * 0.0713548163f + 1.59576912f));
}

// ---- sin and cos --------------------------------------------------------------------------------

/// Beyond this the reduction in double loses bits: such lanes go through libm.
constexpr float kTrigLimit = 1.0e6f;

/// sin of r in [-pi/4, pi/4] and as many times pi/2 as `quadrant` says.
RM_INLINE vf trig_of_quadrant(vf r, vi quadrant) {
  const vf s = r * r;
  vf a = vset(2.7182744e-06f);
  a = a * s - 0.00019839331f;
  a = a * s + 0.00833332937f;
  a = a * s - 0.166666666f;
  const vf sine = vcopysign(a * s * r + r, r);  // -0 plus +0 would be +0
  vf b = vset(2.44380891e-05f);
  b = b * s - 0.00138873645f;
  b = b * s + 0.0416666468f;
  const vf cosine = b * (s * s) + (1.0f - 0.5f * s);
  const vf y = (quadrant & 1) != 0 ? cosine : sine;
  return as_float(as_int(y) ^ ((quadrant & 2) << 30));
}

/// sin(x) when quarter = 0, cos(x) when quarter = 1: any x, lane by lane where it is huge.
RM_INLINE vf vtrig_far(vf x, int quarter) {
  const vd wide = __builtin_convertvector(x, vd);
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  const vd n = (wide * 0.63661977236758134308 + kMagic) - kMagic;
  // pi/2 in two parts: 33 bits, so that n times the first is exact, and the rest.
  const vd rest = (wide - n * 1.57079632673412561417e+00) - n * 6.07710050650619224932e-11;
  const vi quadrant = __builtin_convertvector(__builtin_convertvector(n, vf), vi) + quarter;
  vf y = trig_of_quadrant(__builtin_convertvector(rest, vf), quadrant);
  for (int i = 0; i < kWidth; ++i) {
    if (!(__builtin_fabsf(x[i]) <= kTrigLimit)) {
      y[i] = quarter ? __builtin_cosf(x[i]) : __builtin_sinf(x[i]);
    }
  }
  return y;
}

#if RM_ISA_LEVEL >= 1
/// Up to here a reduction in f32 keeps every bit that counts, given products that do not round.
constexpr float kTrigNear = 1.0e4f;

RM_INLINE vf less_product(vf x, vf n, float c) {
#if RM_ISA_LEVEL >= 2
  return reinterpret_cast<vf>(_mm512_fnmadd_ps(reinterpret_cast<__m512>(n), _mm512_set1_ps(c),
                                               reinterpret_cast<__m512>(x)));
#else
  return reinterpret_cast<vf>(_mm256_fnmadd_ps(reinterpret_cast<__m256>(n), _mm256_set1_ps(c),
                                               reinterpret_cast<__m256>(x)));
#endif
}

RM_INLINE vf vtrig(vf x, int quarter) {
  if (__builtin_expect(any_lane(~(vabs(x) <= kTrigNear)), 0)) return vtrig_far(x, quarter);
  const vf t = x * 0.636619772f + kRoundMagic;
  const vf n = t - kRoundMagic;
  // pi/2 in three parts, each below what is left: so -0 keeps its sign.
  const vf r = less_product(less_product(less_product(x, n, 1.57079625f), n, 7.54978942e-08f), n,
                            5.39030253e-15f);
  return trig_of_quadrant(r, as_int(t) + quarter);  // the magic number is a multiple of 4
}
#else
RM_INLINE vf vtrig(vf x, int quarter) { return vtrig_far(x, quarter); }
#endif

}  // namespace rm::cpu::RM_ISA
