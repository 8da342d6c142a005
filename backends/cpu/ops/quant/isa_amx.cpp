// Weights of few bits to bf16 as matrix tiles read their right operand.
//
// Two tiles of the weight side by side are sixteen rows, four elements of each in a word. An element is
// put into the fraction of a number between 1 and 2: one multiply-add takes the 1 away and scales, and
// since integer and scale have few digits it rounds nothing. Two elements of k become a line of bf16.
#include <immintrin.h>

#include "ops/quant/amx_kernels.hpp"
#include "ops/quant/isa_half.hpp"

namespace rm::cpu::quant::RM_ISA {
namespace {

constexpr int64_t kLine = 64;

RM_INLINE __m512i two_halves(const uint8_t* w0, const uint8_t* w1) {
  const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w0)));
  return _mm512_inserti64x4(low, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w1)), 1);
}

/// What makes numbers of fractions 1 + (q - zero + bias) / range: times `factor`, plus `offset`.
struct Scales {
  __m512 factor, offset;
};

RM_INLINE Scales load_scales(const AmxTiles& a, int64_t block, float range, float bias) {
  int64_t group = block / a.group_blocks;
  if (group >= a.groups) group = a.groups - 1;  // padding
  const auto from = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(a.scale[i] + group * kTile));
  };
  const __m512 scale = _mm512_cvtph_ps(_mm256_set_m128i(from(1), from(0)));
  return {_mm512_mul_ps(scale, _mm512_set1_ps(range)),
          _mm512_mul_ps(scale, _mm512_set1_ps(-(range + bias)))};
}

/// Bits kBit.. of each word of v, as many as the mask has, moved to the mask's.
template <int kFrom, int kTo>
RM_INLINE __m512 value(__m512i v, __m512i mask, const Scales& s) {
  const __m512i moved = kTo >= kFrom ? _mm512_slli_epi32(v, kTo >= kFrom ? kTo - kFrom : 0)
                                     : _mm512_srli_epi32(v, kTo >= kFrom ? 0 : kFrom - kTo);
  const __m512i fraction = _mm512_ternarylogic_epi32(moved, mask, _mm512_set1_epi32(0x3f800000), 0xea);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(fraction), s.factor, s.offset);
}

/// A line: of sixteen rows two neighbouring elements of k.
RM_INLINE void store_pairs(char* dst, __m512 first, __m512 second) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7,
                                         22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(second, first);
  _mm512_storeu_si512(dst, _mm512_permutexvar_epi16(order, apart));
}

void tiles8(const AmxTiles& a) {
  const __m512i mask = _mm512_set1_epi32(0xff << 15), sign = _mm512_set1_epi8(static_cast<char>(0x80));
  for (int64_t b = 0; b < a.blocks; ++b) {
    const Scales s = load_scales(a, b, 256, 128);
    char* dst = a.dst + b * kChunkBlockBytes;
#pragma GCC unroll 8
    for (int u = 0; u < 8; ++u, dst += 2 * kLine) {
      const int64_t at = b * kTile * kBlock + 32 * u;
      const __m512i v = _mm512_xor_si512(two_halves(a.w[0] + at, a.w[1] + at), sign);
      store_pairs(dst, value<0, 15>(v, mask, s), value<8, 15>(v, mask, s));
      store_pairs(dst + kLine, value<16, 15>(v, mask, s), value<24, 15>(v, mask, s));
    }
  }
}

void tiles4(const AmxTiles& a) {
  const __m512i mask = _mm512_set1_epi32(15 << 19);
  for (int64_t b = 0; b < a.blocks; b += 2) {
    const Scales s = load_scales(a, b, 16, 8), next = load_scales(a, b + 1, 16, 8);
    char *low = a.dst + b * kChunkBlockBytes, *high = low + kChunkBlockBytes;
#pragma GCC unroll 8
    for (int u = 0; u < 8; ++u, low += 2 * kLine, high += 2 * kLine) {
      const int64_t at = b * kTile * kBlock / 2 + 32 * u;
      const __m512i v = two_halves(a.w[0] + at, a.w[1] + at);
      store_pairs(low, value<0, 19>(v, mask, s), value<8, 19>(v, mask, s));
      store_pairs(low + kLine, value<16, 19>(v, mask, s), value<24, 19>(v, mask, s));
      store_pairs(high, value<4, 19>(v, mask, next), value<12, 19>(v, mask, next));
      store_pairs(high + kLine, value<20, 19>(v, mask, next), value<28, 19>(v, mask, next));
    }
  }
}

RM_INLINE __m512i narrow(const float* x) {
  return (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + kBlock / 2), _mm512_loadu_ps(x));
}

void row(const AmxRow& a) {
  for (int64_t b = 0; b < a.blocks; ++b) {
    _mm512_storeu_si512(a.dst + b * kLine, narrow(a.row + b * kBlock));
  }
}

void column(const AmxRow& a) {
  const __m512i lines = _mm512_mullo_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(kLine));
  for (int64_t b = 0; b < a.blocks; ++b) {
    _mm512_i32scatter_epi32(a.dst + b * kChunkBlockBytes, lines, narrow(a.row + b * kBlock), 1);
  }
}

}  // namespace

extern constinit const AmxFill amx_fill = {{tiles8, tiles4}, row, column};

}  // namespace rm::cpu::quant::RM_ISA
