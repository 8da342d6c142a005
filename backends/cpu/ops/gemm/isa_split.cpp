// Products of f32 on matrix tiles of bf16 (AMX): x = x1 + x2 + x3 exactly, three bf16 numbers of which each is what
// rounding left of the one before, and a b = a1 b1 + (a1 b2 + a2 b1) + (a1 b3 + a2 b2 + a3 b1). What is left out,
// a2 b3 + a3 b2 + a3 b3, is at most 2^-26 of |a b|: less than a rounding to f32.
#include <immintrin.h>

#include "ops/gemm/split_kernels.hpp"
#include "ops/gemm/transpose.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

static_assert(kNr == kSplitSide && kWidth == 16);

constexpr int64_t kLine = 64, kTile = 1024;
constexpr int kHalf = 16;  // rows of a tile

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr Shapes kShapes;

void open() { _tile_loadconfig(&kShapes); }
void close() { _tile_release(); }

template <int kWrite, int kLevel>
RM_INLINE void fetch(SplitAhead& x, int64_t lines) {
  if (x.count < lines) lines = x.count;
  x.count -= lines;
  for (; lines > 0; --lines) {
    __builtin_prefetch(x.at, kWrite, kLevel);
    x.at += kLine;
    if (--x.left == 0) {
      x.left = x.lines;
      x.at += x.stride - x.lines * kLine;
    }
  }
}

/// Tiles 0 to 3 are sums; 4, 5 one part of a's rows, 6, 7 one of b's columns.
void multiply(const SplitArgs& args) {
  constexpr int64_t kRow = kSplitSide * 4, kBelow = kHalf * kSplitSide;
  // The compiler's intrinsics do not say that they read memory.
  __asm__ volatile("" ::: "memory");
  if (args.accumulate) {
    _tile_loadd(0, args.sums, kRow);
    _tile_loadd(1, args.sums + kHalf, kRow);
    _tile_loadd(2, args.sums + kBelow, kRow);
    _tile_loadd(3, args.sums + kBelow + kHalf, kRow);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  const char *a = args.a, *b = args.b;
  SplitAhead written = *args.written, read = *args.read;
  const int64_t write_lines = (written.count + args.steps - 1) / args.steps;
#define RM_LOAD(tile, at, number) _tile_loadd(tile, (at) + (number) * kTile, kLine)
  for (int64_t k = 0; k < args.steps; ++k, a += kSplitStepBytes, b += kSplitStepBytes) {
    RM_LOAD(4, a, 0);  // a1 b3
    RM_LOAD(6, b, 4);
    _tile_dpbf16ps(0, 4, 6);
    RM_LOAD(7, b, 5);
    _tile_dpbf16ps(1, 4, 7);
    RM_LOAD(5, a, 1);
    _tile_dpbf16ps(2, 5, 6);
    RM_LOAD(6, b, 2);
    _tile_dpbf16ps(3, 5, 7);
    fetch<1, 3>(written, write_lines);
    _tile_dpbf16ps(0, 4, 6);  // a1 b2
    RM_LOAD(7, b, 3);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    RM_LOAD(4, a, 2);
    _tile_dpbf16ps(3, 5, 7);
    _tile_dpbf16ps(0, 4, 6);  // a2 b2
    RM_LOAD(5, a, 3);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    RM_LOAD(6, b, 0);
    _tile_dpbf16ps(3, 5, 7);
    fetch<0, 2>(read, args.read_lines);
    _tile_dpbf16ps(0, 4, 6);  // a2 b1
    RM_LOAD(7, b, 1);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(1, 4, 7);
    RM_LOAD(4, a, 4);
    _tile_dpbf16ps(3, 5, 7);
    _tile_dpbf16ps(0, 4, 6);  // a3 b1
    RM_LOAD(5, a, 5);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    RM_LOAD(4, a, 0);
    _tile_dpbf16ps(3, 5, 7);
    _tile_dpbf16ps(0, 4, 6);  // a1 b1
    RM_LOAD(5, a, 1);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
#undef RM_LOAD
  _tile_stored(0, args.sums, kRow);
  _tile_stored(1, args.sums + kHalf, kRow);
  _tile_stored(2, args.sums + kBelow, kRow);
  _tile_stored(3, args.sums + kBelow + kHalf, kRow);
  __asm__ volatile("" ::: "memory");
  *args.read = read;
}

/// The part of x that bf16 holds, in f32: rounded to nearest, ties away from zero.
RM_INLINE vu high(vu x) { return (x + 0x8000) & 0xffff0000; }
RM_INLINE vu less(vu x, vu y) { return (vu)((vf)x - (vf)y); }

/// High words of two vectors beside each other: x's in the lower half (a row of a), or x's and y's in turns (pairs
/// of k of b's columns).
template <bool kPairs>
RM_INLINE vu join(vu x, vu y) {
  typedef uint16_t vw __attribute__((vector_size(64)));
  vw mask;
  for (int i = 0; i < 32; ++i) mask[i] = static_cast<uint16_t>(kPairs ? i / 2 * 2 + 1 + i % 2 * 32 : 2 * i + 1);
  return (vu)__builtin_shuffle((vw)x, (vw)y, mask);
}

/// Two vectors that share a line of a tile, as the line of each part's tile.
template <bool kPairs>
RM_INLINE void part(vu x, vu y, char* line) {
  const vu x1 = high(x), y1 = high(y);
  store_bits(line, join<kPairs>(x1, y1));
  x = less(x, x1), y = less(y, y1);
  const vu x2 = high(x), y2 = high(y);
  store_bits(line + 2 * kTile, join<kPairs>(x2, y2));
  store_bits(line + 4 * kTile, join<kPairs>(less(x, x2), less(y, y2)));
}

RM_INLINE vu larger(vu most, vu x) {
  x &= 0x7fffffff;
  return x > most ? x : most;
}

/// Half a strip's rows of one step where they do not lie as tiles are made of them: [row][k].
RM_INLINE void gather(const SplitPack& p, int64_t row, int64_t k, float* block) {
  const int64_t rows = imin(kHalf, p.rows - row), count = imin(kSplitDepth, p.k - k);
  __builtin_memset(block, 0, kHalf * kSplitDepth * sizeof *block);
  for (int64_t r = 0; r < rows; ++r) {
    const float* src = p.src + (row + r) * p.row_stride + k * p.k_stride;
    for (int64_t j = 0; j < count; ++j) block[r * kSplitDepth + j] = src[j * p.k_stride];
  }
}

/// Half a strip's rows of one step. kColumns: as tiles of b's columns.
template <bool kColumns>
RM_INLINE vu half_step(const SplitPack& p, int64_t row, int64_t k, char* dst, vu most) {
  float block[kHalf * kSplitDepth];
  const bool whole = p.rows - row >= kHalf && p.k - k >= kSplitDepth;
  const float* src = p.src + row * p.row_stride + k * p.k_stride;
  int64_t row_stride = p.row_stride;
  const bool lines = whole && p.row_stride == 1 && p.k_stride != 1;  // a line holds rows of one k
  if (!whole || (!lines && p.k_stride != 1)) {
    gather(p, row, k, block);
    src = block, row_stride = kSplitDepth;
  }
  vu low[kWidth], high_half[kWidth];  // of k when a vector is a row of a, else its first and second 16
  if (lines) {
    load_square(src, p.k_stride, low);
    load_square(src + kWidth * p.k_stride, p.k_stride, high_half);
  } else {
    load_square(src, row_stride, low);
    load_square(src + kWidth, row_stride, high_half);
  }
  if (lines != kColumns) {
    transpose(low);
    transpose(high_half);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) most = larger(larger(most, low[i]), high_half[i]);
  if constexpr (kColumns) {
#pragma GCC unroll 8
    for (int i = 0; i < kWidth / 2; ++i) {
      part<true>(low[2 * i], low[2 * i + 1], dst + i * kLine);
      part<true>(high_half[2 * i], high_half[2 * i + 1], dst + (kWidth / 2 + i) * kLine);
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) part<false>(low[i], high_half[i], dst + i * kLine);
  }
  return most;
}

template <bool kColumns>
uint32_t pack(const SplitPack& p) {
  vu most{};
  char* dst = p.dst;
  for (int64_t k = 0; k < p.k; k += kSplitDepth, dst += kSplitStepBytes) {
    for (int half = 0; half < 2; ++half) {
      if (half * kHalf < p.rows) {
        most = half_step<kColumns>(p, half * kHalf, k, dst + half * kTile, most);
      } else {
        for (int i = 0; i < kSplitParts; ++i) __builtin_memset(dst + (2 * i + 1) * kTile, 0, kTile);
      }
    }
  }
  uint32_t largest = 0;
  for (int i = 0; i < kWidth; ++i) largest = most[i] > largest ? most[i] : largest;
  return largest;
}

}  // namespace

extern constinit const SplitSet split_kernels = {open, multiply, close, pack<false>, pack<true>};

}  // namespace rm::cpu::gemm::RM_ISA
