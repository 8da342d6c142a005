// log1p, expm1, softplus and pow on vectors of f32.
//
// Errors stay within 2 ulp; signs of zero, Inf and NaN are those of libm, lane by lane and without
// calling it.  pow goes through log2 and exp2 in double, so that large exponents lose nothing.
#pragma once

#include "common/vec_halves.hpp"
#include "common/vec_math.hpp"

namespace rm::cpu::RM_ISA {

/// log(u) for u = 1 + x: the bits that rounding u lost are given back to the mantissa.
RM_INLINE vf vlog1p(vf x) {
  const vf u = 1.0f + x;
  const vf lost = x > 1.0f ? 1.0f - (u - x) : x - (u - 1.0f);
  const vi bits = reinterpret_cast<vi>(reinterpret_cast<vu>(u) - 0x3f3504f3u);
  const vi e = bits >> 23;
  // Beyond 2^24 the lost part no longer counts; the scale must not leave the exponent's range.
  const vi down = e > 126 ? vi{} : (127 - e) << 23;
  const vf f = (as_float((bits & 0x007fffff) + 0x3f3504f3) - 1.0f) + lost * as_float(down);
  vf y = log_of_mantissa(f, __builtin_convertvector(e, vf));
  const float inf = __builtin_inff();
  y = (x == inf) | (x == 0.0f) ? x : y;
  y = x == -1.0f ? vset(-inf) : y;
  return (x < -1.0f) | (x != x) ? vset(__builtin_nanf("")) : y;
}

RM_INLINE vf vexpm1(vf x) {
  vf c = x > 89.0f ? vset(89.0f) : x;
  c = c < -18.0f ? vset(-18.0f) : c;  // -1 to the last bit
  const vf t = c * 1.44269504f + kRoundMagic;
  const vf n = t - kRoundMagic;
  const vi e = as_int(t) - kRoundMagicBits;
  const vf high = c - n * 0.693359375f, low = n * 2.12194440e-4f;
  const vf r = high + low;
  vf q = vset(0.00019914981f);
  q = q * r + 0.001394268f;
  q = q * r + 0.008333272f;
  q = q * r + 0.041666333f;
  q = q * r + 0.16666667f;
  q = q * r + 0.5f;
  // 2^e ((e^r - 1) + (1 - 2^-e)), with the rounding of r put back.
  const vf rest = (high - r) + low;
  const vf p = r + (q * (r * r) + rest);
  const vf inverse = as_float((e > 127 ? vi{} : 127 - e) << 23);
  const vi half = e >> 1;
  const vf y =
      ((1.0f - inverse) + p) * as_float((half + 127) << 23) * as_float((e - half + 127) << 23);
  return x == 0.0f ? x : y;
}

/// torch's: the identity above 20.
RM_INLINE vf vsoftplus(vf x) { return x > 20.0f ? x : vlog1p(vexp(x)); }

// ---- pow ----------------------------------------------------------------------------------------

/// log2 of widened floats >= 0; 0 and Inf become numbers that no exponent brings back into range.
RM_INLINE vdh log2_wide(vdh x) {
  constexpr uint64_t kRootHalf = 0x3fe6a09e667f3bcdu;  // mantissas in [sqrt(1/2), sqrt(2))
  const vuh bits = reinterpret_cast<vuh>(x) + (0x3ff0000000000000u - kRootHalf);
  // The biased exponent below the mantissa of 2^52 is that exponent as a number.
  const vdh n = reinterpret_cast<vdh>((bits >> 52) | 0x4330000000000000u) - (0x1p52 + 1023.0);
  const vdh m = reinterpret_cast<vdh>((bits & 0x000fffffffffffffu) + kRootHalf);
  const vdh s = (m - 1.0) / (m + 1.0), z = s * s;
  vdh p = vdh{} + 0.34075455574270047;
  p = p * z + 0.41167138322469188;
  p = p * z + 0.57708360762708988;
  p = p * z + 0.96179667321976003;
  p = p * z + 2.8853900817901872;
  vdh y = p * s + n;
  y = x == 0.0 ? vdh{} - 1e300 : y;
  return x == __builtin_inf() ? vdh{} + 1e300 : y;
}

/// 2^t, to be rounded to f32: beyond 160 either way that is Inf or 0.
RM_INLINE vdh exp2_wide(vdh t) {
  t = t > 160.0 ? vdh{} + 160.0 : t;
  t = t < -160.0 ? vdh{} - 160.0 : t;
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  const vdh shifted = t + kMagic;
  const vdh f = t - (shifted - kMagic);
  vdh p = vdh{} + 0.00015478311410310752;
  p = p * f + 0.0013400700484992654;
  p = p * f + 0.0096179934693983726;
  p = p * f + 0.055503265423788202;
  p = p * f + 0.24022651514478333;
  p = p * f + 0.69314720702592703;
  p = p * f + 1.0;
  return p * reinterpret_cast<vdh>((reinterpret_cast<vuh>(shifted) << 52) + 0x3ff0000000000000u);
}

RM_INLINE vdh pow_wide(vdh x, vdh y) {
  y = y > 1e39 ? vdh{} + 1e39 : y;  // Inf times log2(1) would be NaN
  y = y < -1e39 ? vdh{} - 1e39 : y;
  return exp2_wide(y * log2_wide(x));
}

RM_INLINE vf vpow(vf x, vf y) {
  const vf a = vabs(x), magnitude = vabs(y);
  const Halves base = widen_halves(a), power = widen_halves(y);
  const vf r = narrow_halves({pow_wide(base.low, power.low), pow_wide(base.high, power.high)});
  // From 2^23 on every float is an integer, from 2^24 on an even one.
  const vi small = magnitude < 16777216.0f;
  const vi whole = __builtin_convertvector(small ? y : vf{}, vi);
  const vi fraction = small & (__builtin_convertvector(whole, vf) != y);
  const vi odd = small & ~fraction & ((whole & 1) != 0);
  vf z = as_float(as_int(r) ^ (odd & as_int(x) & INT32_MIN));
  z = (x < 0.0f) & (a != __builtin_inff()) & fraction ? vset(__builtin_nanf("")) : z;
  z = (x != x) | (y != y) ? x + y : z;
  return (y == 0.0f) | (x == 1.0f) ? vset(1.0f) : z;
}

}  // namespace rm::cpu::RM_ISA
