// Sums of the lanes of eight vectors at once: a product of few rows ends in many of them.
//
// Include only from ISA sources. The order of the additions is the same for each of the eight.
#pragma once

#if RM_ISA_LEVEL >= 1
#include <immintrin.h>
#endif

namespace rm::cpu::RM_ISA {
namespace {

/// out[i] = the sum of a[i]'s lanes; V: the vector of f32 of the level.
template <class V>
inline __attribute__((always_inline)) void sum_eight(const V* a, float* out) {
#if RM_ISA_LEVEL >= 1
  __m256 half[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
#if RM_ISA_LEVEL >= 2
    const __m512 v = (__m512)a[i];
    half[i] = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
#else
    half[i] = (__m256)a[i];
#endif
  }
  __m256 four[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const __m256* h = half + 4 * i;
    four[i] = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
  }
  const __m256 low = _mm256_permute2f128_ps(four[0], four[1], 0x20);
  const __m256 high = _mm256_permute2f128_ps(four[0], four[1], 0x31);
  _mm256_storeu_ps(out, _mm256_add_ps(low, high));
#else
  constexpr int kLanes = sizeof(V) / sizeof(float);
  for (int i = 0; i < 8; ++i) {
    float sum = 0;
    for (int lane = 0; lane < kLanes; ++lane) sum += a[i][lane];
    out[i] = sum;
  }
#endif
}

}  // namespace
}  // namespace rm::cpu::RM_ISA
