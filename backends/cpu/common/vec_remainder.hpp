// torch's remainder and floor_divide on vectors of f32: exact, as fmod is.
//
// Invariant: a quotient below 2^28 times an f32 divisor has at most 53 bits, so what is left of the
// dividend is exact in f64.  Other vectors (huge quotients, Inf, NaN, division by zero) go through
// libm, lane by lane.
#pragma once

#include "common/vec_halves.hpp"
#include "common/vec_math.hpp"

namespace rm::cpu::RM_ISA {

RM_INLINE float remainder_of(float a, float b) {
  const float r = __builtin_fmodf(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
// Exact even where a / b rounds up to an integer.
RM_INLINE float floor_div_of(float a, float b) {
  if (b == 0) return a / b;
  const float r = __builtin_fmodf(a, b);
  float q = (a - r) / b;
  if (r != 0 && (b < 0) != (r < 0)) q -= 1.0f;
  if (q == 0) return __builtin_copysignf(0.0f, a / b);
  float f = __builtin_floorf(q);
  if (q - f > 0.5f) f += 1.0f;
  return f;
}

struct Division {
  vdh quotient, rest;  // rest has the divisor's sign or is 0
};
RM_INLINE Division divide_wide(vdh a, vdh b) {
  constexpr double kMagic = 6755399441055744.0;  // 1.5 * 2^52
  const vdh q = (a / b + kMagic) - kMagic;
  const vdh r = a - q * b;
  // Rounding to nearest may have gone one too far.
  const auto over = ((r < 0.0) & (b > 0.0)) | ((r > 0.0) & (b < 0.0));
  return {over ? q - 1.0 : q, over ? r + b : r};
}

/// Whether every lane's quotient lies below `limit`, and the divisor is finite.
RM_INLINE bool divides_exactly(vf a, vf b, float limit) {
  return !any_lane(~((vabs(a / b) < limit) & (vabs(b) < __builtin_inff())));
}

RM_INLINE vf vremainder(vf a, vf b) {
  vf y;
  if (__builtin_expect(!divides_exactly(a, b, 0x1p28f), 0)) {
    for (int i = 0; i < kWidth; ++i) y[i] = remainder_of(a[i], b[i]);
    return y;
  }
  const Halves x = widen_halves(a), d = widen_halves(b);
  y = narrow_halves({divide_wide(x.low, d.low).rest, divide_wide(x.high, d.high).rest});
  return y == 0.0f ? vcopysign(y, a) : y;
}

RM_INLINE vf vfloor_div(vf a, vf b) {
  vf y;
  // Above, torch's own steps in f32 no longer give the exact floor.
  if (__builtin_expect(!divides_exactly(a, b, 0x1p22f), 0)) {
    for (int i = 0; i < kWidth; ++i) y[i] = floor_div_of(a[i], b[i]);
    return y;
  }
  const Halves x = widen_halves(a), d = widen_halves(b);
  y = narrow_halves({divide_wide(x.low, d.low).quotient, divide_wide(x.high, d.high).quotient});
  return y == 0.0f ? vcopysign(vf{}, as_float(as_int(a) ^ as_int(b))) : y;
}

}  // namespace rm::cpu::RM_ISA
