// Products of a few rows of x, rounded to 8 bits, with weights in tiles of eight rows, on matrix
// tiles (AMX). Bound: reading the weight once.
//
// Two of the weight's tiles side by side are the right operand of a product as they lie: four
// elements of k of sixteen rows are a line of 64 bytes. Sums of a block of 32 are exact integers;
// what follows, a conversion and a multiply-add by the scales of x and of the weight, is that of
// isa_tile.cpp in the same order, so the bits are the same.
//
// Blocks go through three stages, four of them at a time: bytes of the weight are put side by side,
// multiplied, and their sums scaled. Each stage reads what the one before it wrote a turn ago.
#include <immintrin.h>

#include "ops/quant/few_kernels.hpp"
#include "ops/quant/isa_half.hpp"

namespace rm::cpu::quant::RM_ISA {
namespace {

constexpr int kTurn = 4;  // blocks
constexpr int64_t kLine = 64, kLines = kBlock / 4;
constexpr int64_t kBlockBytes = kLines * kLine;  // of kStrip rows

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

/// Tiles 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 the weight.
void open(int64_t rows) {
  Shapes shapes;
  for (int t = 0; t < 8; ++t) {
    shapes.row_bytes[t] = t == 4 || t == 5 ? kBlock : kLine;
    shapes.rows[t] = static_cast<uint8_t>(t < 6 ? rows : kLines);
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(shapes) : "memory");
}

void close() { _tile_release(); }

struct Scratch {
  alignas(64) uint8_t bytes[2][kTurn][kBlockBytes];
  alignas(64) int32_t sums[2][kTurn][kMostFewRows][kStrip];
  alignas(64) float acc[2][kMostFewRows][kStrip];  // of even and odd blocks; with 8 bits the first
};

// The compiler's intrinsics do not say that they read memory.
RM_INLINE void written() { __asm__ volatile("" ::: "memory"); }

RM_INLINE __m512i two_halves(const uint8_t* w0, const uint8_t* w1) {
  const __m512i low = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w0)));
  return _mm512_inserti64x4(low, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w1)), 1);
}

/// Blocks [b, b + count) side by side. Integers 0..15 of 4 bits become 16 * (n - 8), a signed byte.
template <int kBits>
RM_INLINE void place(const FewArgs& a, int64_t b, int64_t count, uint8_t (*to)[kBlockBytes]) {
  constexpr int64_t kTileBytes = kBits == 8 ? kLines * 32 : kLines * 16;  // of a block
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(0xf0));
  const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
  for (int64_t j = 0; j < count; j += kBits == 8 ? 1 : 2) {
    const uint8_t *w0 = a.w[0] + (b + j) * kTileBytes, *w1 = a.w[1] + (b + j) * kTileBytes;
#pragma GCC unroll 8
    for (int u = 0; u < kLines; ++u) {
      if (u % 2 == 0) {
        __builtin_prefetch(w0 + a.ahead + 32 * u, 0, 2);
        __builtin_prefetch(w1 + a.ahead + 32 * u, 0, 2);
      }
      const __m512i both = two_halves(w0 + 32 * u, w1 + 32 * u);
      if constexpr (kBits == 8) {
        _mm512_store_si512(to[j] + kLine * u, both);
      } else {
        _mm512_store_si512(to[j] + kLine * u,
                           _mm512_ternarylogic_epi32(_mm512_slli_epi16(both, 4), mask, sign, 0x6a));
        _mm512_store_si512(to[j + 1] + kLine * u, _mm512_ternarylogic_epi32(both, mask, sign, 0x6a));
      }
    }
  }
}

template <bool kFour>
RM_INLINE void products(const FewArgs& a, int64_t b, const uint8_t (*bytes)[kBlockBytes]) {
  const int8_t* x = a.x + b * a.rows * kBlock;
  const int64_t step = a.rows * kBlock;
  written();
  _tile_zero(0);
  _tile_loadd(4, x, kBlock);
  _tile_loadd(6, bytes[0], kLine);
  _tile_dpbssd(0, 4, 6);
  _tile_zero(1);
  _tile_loadd(5, x + step, kBlock);
  _tile_loadd(7, bytes[1], kLine);
  _tile_dpbssd(1, 5, 7);
  if constexpr (kFour) {
    _tile_zero(2);
    _tile_loadd(4, x + 2 * step, kBlock);
    _tile_loadd(6, bytes[2], kLine);
    _tile_dpbssd(2, 4, 6);
    _tile_zero(3);
    _tile_loadd(5, x + 3 * step, kBlock);
    _tile_loadd(7, bytes[3], kLine);
    _tile_dpbssd(3, 5, 7);
  }
}

RM_INLINE void store_sums(int32_t (*sums)[kMostFewRows][kStrip]) {
  _tile_stored(0, sums[0], kLine);
  _tile_stored(1, sums[1], kLine);
  _tile_stored(2, sums[2], kLine);
  _tile_stored(3, sums[3], kLine);
}

/// The scales of kStrip rows; of 4 bits a sixteenth of them, which is exact.
template <int kBits>
RM_INLINE __m512 weight_scales(const FewArgs& a, int64_t b) {
  int64_t g = b / a.group_blocks;
  if (g >= a.groups) g = a.groups - 1;  // padding, where x = 0
  const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a.scale[0] + g * kTile));
  const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a.scale[1] + g * kTile));
  const __m512 scales = _mm512_cvtph_ps(_mm256_set_m128i(high, low));
  return kBits == 8 ? scales : _mm512_mul_ps(scales, _mm512_set1_ps(1.f / 16));
}

template <int kBits, int kCount>
RM_INLINE void scale(const FewArgs& a, int64_t b, const int32_t (*sums)[kMostFewRows][kStrip],
                     float (*acc)[kMostFewRows][kStrip]) {
  __m512 factors[kCount];
#pragma GCC unroll 4
  for (int j = 0; j < kCount; ++j) factors[j] = weight_scales<kBits>(a, b + j);
  const float* x = a.scales + b * a.rows;
  for (int64_t r = 0; r < a.rows; ++r) {
    __m512 sum[2] = {_mm512_load_ps(acc[0][r]), _mm512_load_ps(acc[1][r])};
#pragma GCC unroll 4
    for (int j = 0; j < kCount; ++j) {
      const int to = kBits == 8 ? 0 : j % 2;
      sum[to] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_load_si512(sums[j][r])),
                                _mm512_mul_ps(factors[j], _mm512_set1_ps(x[j * a.rows + r])), sum[to]);
    }
    _mm512_store_ps(acc[0][r], sum[0]);
    if (kBits == 4) _mm512_store_ps(acc[1][r], sum[1]);
  }
}

/// Sums of a turn are stored in the next one and scaled in that after it: a product takes 52 cycles.
template <int kBits>
RM_INLINE void turn(const FewArgs& a, int64_t b, Scratch& s, int at) {
  if (b > 0) store_sums(s.sums[1 - at]);
  if (a.blocks - b >= kTurn) {
    products<true>(a, b, s.bytes[at]);
  } else {
    products<false>(a, b, s.bytes[at]);
  }
  if (b + kTurn < a.blocks) {
    const int64_t left = a.blocks - b - kTurn;
    place<kBits>(a, b + kTurn, left < kTurn ? left : kTurn, s.bytes[1 - at]);
  }
  if (b >= 2 * kTurn) scale<kBits, kTurn>(a, b - 2 * kTurn, s.sums[at], s.acc);
}

template <int kBits>
RM_INLINE void all_blocks(const FewArgs& a, Scratch& s) {
  place<kBits>(a, 0, a.blocks < kTurn ? a.blocks : kTurn, s.bytes[0]);
  int64_t b = 0;
  int at = 0;
  for (; b < a.blocks; b += kTurn, at = 1 - at) turn<kBits>(a, b, s, at);
  if (b >= 2 * kTurn) scale<kBits, kTurn>(a, b - 2 * kTurn, s.sums[at], s.acc);
  b -= kTurn, at = 1 - at;
  store_sums(s.sums[at]);
  if (a.blocks - b == kTurn) {
    scale<kBits, kTurn>(a, b, s.sums[at], s.acc);
  } else {
    scale<kBits, 2>(a, b, s.sums[at], s.acc);
  }
}

template <int kBits>
void multiply(const FewArgs& a) {
  Scratch s;
  __builtin_memset(s.acc, 0, sizeof s.acc);
  if (a.blocks > 0) all_blocks<kBits>(a, s);
  for (int64_t r = 0; r < a.rows; ++r) {
    const __m512 even = _mm512_load_ps(s.acc[0][r]);
    _mm512_storeu_ps(a.acc + r * a.acc_step,
                     kBits == 8 ? even : _mm512_add_ps(even, _mm512_load_ps(s.acc[1][r])));
  }
}

}  // namespace

extern constinit const FewSet few_kernels = {open, {multiply<8>, multiply<4>}, close};

}  // namespace rm::cpu::quant::RM_ISA
