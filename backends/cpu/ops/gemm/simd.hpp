// Vectors of the ISA this file is compiled for (GCC/Clang vector extensions) and their conversions.
//
// Everything lives in an unnamed namespace of RM_ISA: no symbol may be shared with a translation
// unit built for another instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "ops/gemm/tile.hpp"

#if defined(__AVX512F__)
#define RM_VEC_BYTES 64
#elif defined(__AVX2__)
#define RM_VEC_BYTES 32
#else
#define RM_VEC_BYTES 16
#endif
#define RM_INLINE inline __attribute__((always_inline))

namespace rm::cpu::gemm::RM_ISA {
namespace {

constexpr int kLanes = RM_VEC_BYTES / 4;
constexpr int kNr = 2 * kLanes;

typedef float Vec __attribute__((vector_size(RM_VEC_BYTES)));
typedef float VecMem __attribute__((vector_size(RM_VEC_BYTES), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(RM_VEC_BYTES)));
typedef uint32_t BitsMem __attribute__((vector_size(RM_VEC_BYTES), aligned(2), may_alias));
typedef int32_t Ints __attribute__((vector_size(RM_VEC_BYTES)));
typedef uint16_t Half __attribute__((vector_size(RM_VEC_BYTES / 2)));
typedef uint16_t HalfMem __attribute__((vector_size(RM_VEC_BYTES / 2), aligned(2), may_alias));

RM_INLINE Vec splat(float x) { return x - Vec{}; }

/// x^2 - sq, exactly, for sq = x^2 rounded.
RM_INLINE Vec square_error(Vec x, Vec sq) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmsub_ps((__m512)x, (__m512)x, (__m512)sq);
#elif defined(__FMA__)
  return (Vec)_mm256_fmsub_ps((__m256)x, (__m256)x, (__m256)sq);
#else
  const Vec h = (Vec)((Bits)x & 0xfffff000);  // 12 bits: products of halves are exact
  const Vec l = x - h;
  return ((h * h - sq) + 2.f * h * l) + l * l;
#endif
}

struct F32 {
  using Scalar = float;
  static RM_INLINE Vec load(const float* p) { return *reinterpret_cast<const VecMem*>(p); }
  static RM_INLINE void store(float* p, Vec v) { *reinterpret_cast<VecMem*>(p) = v; }
};

struct BF16 {
  using Scalar = uint16_t;
  static RM_INLINE Vec load(const uint16_t* p) {
    const Half h = *reinterpret_cast<const HalfMem*>(p);
    return (Vec)(__builtin_convertvector(h, Bits) << 16);
  }
  /// Round to nearest even; NaN stays NaN (quiet).
  static RM_INLINE void store(uint16_t* p, Vec v) {
    const Bits u = (Bits)v;
    const Bits rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    const Bits quiet = (u >> 16) | 0x40;
    const Bits out = (v != v) ? quiet : rounded;
    *reinterpret_cast<HalfMem*>(p) = __builtin_convertvector(out, Half);
  }
};

struct F16 {
  using Scalar = uint16_t;
#if defined(__AVX512F__)
  static RM_INLINE Vec load(const uint16_t* p) {
    return (Vec)_mm512_maskz_cvtph_ps(0xffff,
                                      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static RM_INLINE void store(uint16_t* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtps_ph(0xffff, (__m512)v, 0));
  }
#elif defined(__F16C__)
  static RM_INLINE Vec load(const uint16_t* p) {
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static RM_INLINE void store(uint16_t* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph((__m256)v, 0));
  }
#else
  /// The exponent is rebased by one exact multiplication, which also makes subnormals normal.
  static RM_INLINE Vec load(const uint16_t* p) {
    const Bits h = __builtin_convertvector(*reinterpret_cast<const HalfMem*>(p), Bits);
    const Bits magnitude = h & 0x7fff;
    const Bits finite = (Bits)((Vec)(magnitude << 13) * 0x1p112f);
    const Bits special = (magnitude << 13) | 0x7f800000;
    const Bits out = (magnitude >= 0x7c00) ? special : finite;
    return (Vec)(out | ((h & 0x8000) << 16));
  }
  static RM_INLINE void store(uint16_t* p, Vec v) {
    const Bits u = (Bits)v;
    const Bits sign = (u >> 16) & 0x8000;
    const Bits magnitude = u & 0x7fffffff;
    const Bits normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const Bits small = (Bits)((Vec)magnitude + 0.5f) - 0x3f000000;  // the adder rounds to 2^-24
    const Bits nan = (magnitude >> 13 & 0x3ff) | 0x7e00;
    Bits out = (magnitude < (113u << 23)) ? small : normal;
    out = (magnitude >= 0x477ff000) ? Bits{} + 0x7c00 : out;  // 65520 and above round to infinity
    out = (magnitude > 0x7f800000) ? nan : out;
    *reinterpret_cast<HalfMem*>(p) = __builtin_convertvector(out | sign, Half);
  }
#endif
};

}  // namespace
}  // namespace rm::cpu::gemm::RM_ISA
