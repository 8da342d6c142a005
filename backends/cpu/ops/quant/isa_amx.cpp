// Weights of few bits to bf16 in the order in which matrix tiles read them.
//
// A tile keeps four elements of each of eight rows in 32 bytes: a square of 32-bit words transposed
// gives 32 elements of one row. An integer times its scale is rounded once, to bf16; weights of
// 4 bits have 16 such values a group, which are looked up.
#include <immintrin.h>

#include "common/transpose.hpp"
#include "ops/quant/amx_kernels.hpp"
#include "ops/quant/isa_half.hpp"

namespace rm::cpu::quant::RM_ISA {
namespace {

using namespace cpu::RM_ISA;

constexpr int64_t kLine = kBlock * 2;  // bytes of a row's block

typedef int32_t Eight __attribute__((vector_size(32)));

/// 256 bytes of a tile as eight vectors, one a row.
RM_INLINE void load_rows(const uint8_t* w, Eight* rows) {
#pragma GCC unroll 8
  for (int u = 0; u < kTile; ++u) __builtin_memcpy(rows + u, w + 32 * u, sizeof *rows);
  transpose_square<Eight>(rows);
}

RM_INLINE void load_scales(const AmxTile& a, int64_t block, float* scale) {
  int64_t group = block / a.group_blocks;
  if (group >= a.groups) group = a.groups - 1;  // padding
  const auto* from = reinterpret_cast<const __m128i*>(a.scale + group * kTile);
  _mm256_storeu_ps(scale, _mm256_cvtph_ps(_mm_loadu_si128(from)));
}

RM_INLINE void store_line(char* dst, __m512i line) {
  _mm512_storeu_si512(dst, line);
}

RM_INLINE __m512i both(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }

RM_INLINE __m512 floats(__m128i bytes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

void tile8(const AmxTile& a) {
  char* dst = a.dst;
  for (int64_t b = 0; b < a.blocks; ++b, dst += kChunkBlockBytes) {
    float scale[kTile];
    load_scales(a, b, scale);
    Eight rows[kTile];
    load_rows(a.w + b * kTile * kBlock, rows);
#pragma GCC unroll 8
    for (int r = 0; r < kTile; ++r) {
      const __m512 factor = _mm512_set1_ps(scale[r]);
      const __m256i q = (__m256i)rows[r];
      store_line(dst + r * kLine, both(_mm512_mul_ps(floats(_mm256_castsi256_si128(q)), factor),
                                       _mm512_mul_ps(floats(_mm256_extracti128_si256(q, 1)), factor)));
    }
  }
}

/// The values -8..7 times a scale; the other half is not looked up.
RM_INLINE __m512i table(float scale) {
  const __m512 integers = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
  return _mm512_castsi256_si512(
      (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(integers, _mm512_set1_ps(scale))));
}

RM_INLINE __m512i look_up(__m256i nibbles, __m512i values) {
  return _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(nibbles), values);
}

void tile4(const AmxTile& a) {
  const __m256i mask = _mm256_set1_epi8(15);
  char* dst = a.dst;
  for (int64_t b = 0; b < a.blocks; b += 2, dst += 2 * kChunkBlockBytes) {
    float low[kTile], high[kTile];
    load_scales(a, b, low);
    load_scales(a, b + 1, high);
    Eight rows[kTile];
    load_rows(a.w + b * kTile * kBlock / 2, rows);
#pragma GCC unroll 8
    for (int r = 0; r < kTile; ++r) {
      const __m256i q = (__m256i)rows[r];
      store_line(dst + r * kLine, look_up(_mm256_and_si256(q, mask), table(low[r])));
      store_line(dst + r * kLine + kChunkBlockBytes,
                 look_up(_mm256_and_si256(_mm256_srli_epi16(q, 4), mask), table(high[r])));
    }
  }
}

void row(const AmxRow& a) {
  for (int64_t b = 0; b < a.blocks; ++b) {
    const float* x = a.row + b * kBlock;
    store_line(a.dst + b * kChunkBlockBytes,
               both(_mm512_loadu_ps(x), _mm512_loadu_ps(x + kBlock / 2)));
  }
}

}  // namespace

extern constinit const AmxFill amx_fill = {{tile8, tile4}, row};

}  // namespace rm::cpu::quant::RM_ISA
