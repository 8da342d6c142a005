// A vector of f32 as two of f64 that fill one register each, for steps that need more bits.
//
// Include only from ISA sources.
#pragma once

#include "common/vec.hpp"

namespace rm::cpu::RM_ISA {

typedef double vdh __attribute__((vector_size(kWidth * 4)));
typedef uint64_t vuh __attribute__((vector_size(kWidth * 4)));
struct Halves {
  vdh low, high;
};

RM_INLINE Halves widen_halves(vf x) {
#if RM_ISA_LEVEL >= 2
  const __m512 v = reinterpret_cast<__m512>(x);
  return {reinterpret_cast<vdh>(_mm512_cvtps_pd(_mm512_castps512_ps256(v))),
          reinterpret_cast<vdh>(_mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)))};
#elif RM_ISA_LEVEL == 1
  const __m256 v = reinterpret_cast<__m256>(x);
  return {reinterpret_cast<vdh>(_mm256_cvtps_pd(_mm256_castps256_ps128(v))),
          reinterpret_cast<vdh>(_mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)))};
#else
  return {vdh{x[0], x[1]}, vdh{x[2], x[3]}};
#endif
}
RM_INLINE vf narrow_halves(Halves h) {
#if RM_ISA_LEVEL >= 2
  const __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps(reinterpret_cast<__m512d>(h.low)));
  return reinterpret_cast<vf>(
      _mm512_insertf32x8(low, _mm512_cvtpd_ps(reinterpret_cast<__m512d>(h.high)), 1));
#elif RM_ISA_LEVEL == 1
  return reinterpret_cast<vf>(_mm256_set_m128(_mm256_cvtpd_ps(reinterpret_cast<__m256d>(h.high)),
                                              _mm256_cvtpd_ps(reinterpret_cast<__m256d>(h.low))));
#else
  return vf{static_cast<float>(h.low[0]), static_cast<float>(h.low[1]),
            static_cast<float>(h.high[0]), static_cast<float>(h.high[1])};
#endif
}

}  // namespace rm::cpu::RM_ISA
