// Vectors of f32 at the width of the level this file is compiled for, on the compiler's vector
// types: the same source serves SSE2, AVX2, AVX-512 and AArch64.
//
// Include only from ISA sources.  Invariant: everything lives in rm::cpu::RM_ISA and no std::
// function is called, so no code of one level can be linked into another.
#pragma once

#include "common/types.hpp"

#if RM_ISA_LEVEL >= 1
#include <immintrin.h>
#endif

#define RM_INLINE static inline __attribute__((always_inline))
#define RM_MEMBER inline __attribute__((always_inline))

namespace rm::cpu::RM_ISA {

#if RM_ISA_LEVEL >= 2
constexpr int kWidth = 16;
#elif RM_ISA_LEVEL == 1
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float vf __attribute__((vector_size(kWidth * 4)));
typedef int32_t vi __attribute__((vector_size(kWidth * 4)));
typedef uint32_t vu __attribute__((vector_size(kWidth * 4)));
typedef uint16_t vh __attribute__((vector_size(kWidth * 2)));
typedef double vd __attribute__((vector_size(kWidth * 8)));

RM_INLINE int64_t imin(int64_t a, int64_t b) { return a < b ? a : b; }
RM_INLINE int64_t imax(int64_t a, int64_t b) { return a > b ? a : b; }

RM_INLINE vf vset(float x) { return x - vf{}; }
RM_INLINE vi as_int(vf v) { return reinterpret_cast<vi>(v); }
RM_INLINE vf as_float(vi v) { return reinterpret_cast<vf>(v); }
RM_INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }  // b when either is NaN
RM_INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
RM_INLINE vf vabs(vf a) { return as_float(as_int(a) & 0x7fffffff); }
RM_INLINE vf vcopysign(vf magnitude, vf sign) {
  return as_float((as_int(magnitude) & 0x7fffffff) | (as_int(sign) & INT32_MIN));
}

RM_INLINE float vsum(vf v) {
  float s = 0;
  for (int w = kWidth / 2; w >= 1; w /= 2) {
    for (int i = 0; i < w; ++i) v[i] += v[i + w];
  }
  return s + v[0];
}
RM_INLINE float vmax_of(vf v) {
  float m = v[0];
  for (int i = 1; i < kWidth; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// ---- bf16 and f16: one element ------------------------------------------------------------------

RM_INLINE float bits_to_float(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}
RM_INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}
RM_INLINE float widen(float v) { return v; }
RM_INLINE float widen(bf16 v) { return bits_to_float(static_cast<uint32_t>(v.bits) << 16); }
RM_INLINE float widen(f16 v) {
#if RM_ISA_LEVEL >= 1
  return _cvtsh_ss(v.bits);
#else
  const uint32_t sign = (v.bits & 0x8000u) << 16, rest = v.bits & 0x7fffu;
  if (rest >= 0x7c00u) return bits_to_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  // Subnormals are normalised by the multiplication: 2^112 moves the exponent bias.
  const float scaled = bits_to_float(rest << 13) * 0x1p112f;
  return bits_to_float(sign | float_to_bits(scaled));
#endif
}
RM_INLINE void narrow(float v, float* p) { *p = v; }
RM_INLINE void narrow(float v, bf16* p) {
  const uint32_t u = float_to_bits(v);
  const uint32_t rounded = u + 0x7fffu + ((u >> 16) & 1u);
  p->bits = static_cast<uint16_t>(v != v ? ((u >> 16) | 0x40u) : (rounded >> 16));
}
RM_INLINE void narrow(float v, f16* p) {
#if RM_ISA_LEVEL >= 1
  p->bits = static_cast<uint16_t>(_cvtss_sh(v, 0));
#else
  const uint32_t u = float_to_bits(v), sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) {
    p->bits = static_cast<uint16_t>(sign | 0x7e00u | ((a >> 13) & 0x3ffu));
  } else if (a >= 0x477ff000u) {  // rounds to 65520 or more
    p->bits = static_cast<uint16_t>(sign | 0x7c00u);
  } else if (a < 0x38800000u) {  // subnormal: the addition rounds at the 2^-24 place
    const float shifted = bits_to_float(a) + 0.5f;
    p->bits = static_cast<uint16_t>(sign | (float_to_bits(shifted) - 0x3f000000u));
  } else {
    const uint32_t rounded = a + 0xfffu + ((a >> 13) & 1u) - 0x38000000u;
    p->bits = static_cast<uint16_t>(sign | (rounded >> 13));
  }
#endif
}

// ---- loads and stores that widen and narrow -----------------------------------------------------

RM_INLINE vu load_bits(const void* p) {
  vu v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
RM_INLINE void store_bits(void* p, vu v) { __builtin_memcpy(p, &v, sizeof v); }

RM_INLINE vf vload(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
RM_INLINE void vstore(float* p, vf v) { __builtin_memcpy(p, &v, sizeof v); }

RM_INLINE vf vload(const bf16* p) {
#if RM_ISA_LEVEL == 1
  const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<vf>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
#else
  vh h;
  __builtin_memcpy(&h, p, sizeof h);
  return reinterpret_cast<vf>(__builtin_convertvector(h, vu) << 16);
#endif
}
RM_INLINE void vstore(bf16* p, vf v) {
  const vu u = reinterpret_cast<vu>(v);
  const vu rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  const vu quiet = (u >> 16) | 0x40;
  const vu bits = (v != v) ? quiet : rounded;
#if RM_ISA_LEVEL == 1
  const __m256i b = reinterpret_cast<__m256i>(bits);
  const __m128i packed =
      _mm_packus_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
#else
  const vh h = __builtin_convertvector(bits, vh);
  __builtin_memcpy(p, &h, sizeof h);
#endif
}

RM_INLINE vf vload(const f16* p) {
#if RM_ISA_LEVEL >= 2
  return reinterpret_cast<vf>(
      _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif RM_ISA_LEVEL == 1
  return reinterpret_cast<vf>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  // As widen() of one: the multiplication moves the exponent's bias and normalises subnormals.
  vh h;
  __builtin_memcpy(&h, p, sizeof h);
  const vu bits = __builtin_convertvector(h, vu), magnitude = bits & 0x7fffu;
  const vu finite = reinterpret_cast<vu>(reinterpret_cast<vf>(magnitude << 13) * 0x1p112f);
  const vu special = (magnitude << 13) | 0x7f800000u;
  const vu value = magnitude >= 0x7c00u ? special : finite;
  return reinterpret_cast<vf>(value | ((bits & 0x8000u) << 16));
#endif
}
RM_INLINE void vstore(f16* p, vf v) {
#if RM_ISA_LEVEL >= 2
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(reinterpret_cast<__m512>(v), 0));
#elif RM_ISA_LEVEL == 1
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(reinterpret_cast<__m256>(v), 0));
#else
  const vu u = reinterpret_cast<vu>(v), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  const vu normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal: the addition rounds at the 2^-24 place.
  const vu small =
      reinterpret_cast<vu>(reinterpret_cast<vf>(magnitude) + 0.5f) - 0x3f000000u;
  const vu nan = ((magnitude >> 13) & 0x3ffu) | 0x7e00u;
  vu bits = magnitude < (113u << 23) ? small : normal;
  bits = magnitude >= 0x477ff000u ? vu{} + 0x7c00u : bits;  // rounds to 65520 or more
  bits = magnitude > 0x7f800000u ? nan : bits;
  const vh h = __builtin_convertvector(bits | sign, vh);
  __builtin_memcpy(p, &h, sizeof h);
#endif
}

/// The first n < kWidth elements; the others are `fill`.
template <class T>
RM_INLINE vf vload_part(const T* p, int64_t n, float fill = 0) {
  vf v = vset(fill);
  for (int64_t i = 0; i < n; ++i) v[i] = widen(p[i]);
  return v;
}
template <class T>
RM_INLINE void vstore_part(T* p, vf v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) narrow(v[i], p + i);
}

/// dst[0..n) = src[i * stride] as f32.
template <class T>
static void widen_row(const T* src, int64_t stride, float* dst, int64_t n) {
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kWidth <= n; i += kWidth) vstore(dst + i, vload(src + i));
  }
  for (; i < n; ++i) dst[i] = widen(src[i * stride]);
}
/// dst[i * stride] = src[0..n), rounded to nearest even.
template <class T>
static void narrow_row(const float* src, T* dst, int64_t stride, int64_t n) {
  int64_t i = 0;
  if (stride == 1) {
    for (; i + kWidth <= n; i += kWidth) vstore(dst + i, vload(src + i));
  }
  for (; i < n; ++i) narrow(src[i], dst + i * stride);
}

}  // namespace rm::cpu::RM_ISA
