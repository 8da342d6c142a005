// Products of bf16 on matrix tiles (AMX): 16 rows of the weight as they lie ([N, K], K dense) times
// 16 rows of x, whose pairs of k were put side by side once.
//
// The weight is the tiles' left operand, since that one is read row by row: no copy of it is made.
// Sums come out with the weight's rows first and are transposed in registers.
#include <immintrin.h>

#include "ops/gemm/amx_kernels.hpp"
#include "ops/gemm/amx_store.hpp"
#include "ops/gemm/transpose.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

static_assert(kNr == kAmxColumns && kWidth == kAmxRows);

constexpr int64_t kLine = 64;
constexpr int64_t kTile = 256;  // floats

struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr Shapes kShapes;

// The compiler's intrinsics do not say that they read memory: what they read is constant, written by
// other functions, or followed by written().
RM_INLINE void written() { __asm__ volatile("" ::: "memory"); }

void open() { _tile_loadconfig(&kShapes); }

void close() { _tile_release(); }

/// What is fetched while a chunk is multiplied, a share of it a block of k: the next chunk, in the
/// order of memory from four places, since processors fetch ahead within a page.
struct Ahead {
  static constexpr int kPlaces = 4;
  const char* at;
  int64_t step, row_bytes, lines, left;

  RM_INLINE Ahead begin(const void* next, const AmxArgs& a, int64_t blocks) {
    return {static_cast<const char*>(next), kAmxColumns / kPlaces * a.row_bytes, a.row_bytes, blocks, blocks};
  }

  inline __attribute__((always_inline)) void fetch() {
    if (at == nullptr) return;
    for (int i = 0; i < kAmxColumns / kPlaces; ++i) {
#pragma GCC unroll 8
      for (int p = 0; p < kPlaces; ++p) __builtin_prefetch(at + p * step, 0, 2);
      at += kLine;
      if (--left == 0) {
        left = lines;
        at += row_bytes - lines * kLine;
      }
    }
  }
};

/// Lines of sums that are written soon: asked for while tiles are multiplied, since a store that misses
/// the first-level cache holds up those behind it.
struct Owned {
  static constexpr int kEach = 6;
  const char* at;
  int64_t left = kAmxPartial * 4 / kLine;

  inline __attribute__((always_inline)) void fetch() {
    if (left <= 0) return;
#pragma GCC unroll 6
    for (int i = 0; i < kEach; ++i) __builtin_prefetch(at + kLine * i, 1, 3);
    at += kEach * kLine, left -= kEach;
  }
};

/// The last, incomplete block of 16 rows, zeros behind it.
RM_INLINE void copy_rest(const char* w, int64_t row_bytes, int64_t bytes, char* tile) {
  for (int r = 0; r < 16; ++r) {
    __builtin_memset(tile + r * kLine, 0, kLine);
    __builtin_memcpy(tile + r * kLine, w + r * row_bytes, static_cast<size_t>(bytes));
  }
}

/// A tile of sums, [row of the weight][row of x], to [row of x][16 of kAmxColumns].
RM_INLINE void turn(const float* tile, float* acc) {
  vu square[kWidth];
  load_square(reinterpret_cast<const uint32_t*>(tile), kWidth, square);
  transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    F32::store(acc + i * kAmxColumns, (vf)square[i]);
  }
}

// Tiles 0 to 3 are sums, 4 and 5 rows of the weight, 6 and 7 rows of x.

/// Two chunks, one group of rows of x.
void two_chunks(const AmxArgs& a) {
  const int64_t blocks = (a.k + kAmxBlock - 1) / kAmxBlock, whole = a.k / kAmxBlock;
  const char *x = static_cast<const char*>(a.x[0]), *w0 = static_cast<const char*>(a.w[0]);
  const char* w1 = static_cast<const char*>(a.w[1]);
  const int64_t half = 16 * a.row_bytes;
  Ahead ahead0 = Ahead::begin(a.next[0], a, blocks);
  Ahead ahead1 = Ahead::begin(a.next[1], a, blocks);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const auto step = [&](const char* p0, const char* p1, const char* p2, const char* p3,
                        int64_t stride) __attribute__((always_inline)) {
    _tile_loadd(6, x, kLine);
    _tile_loadd(4, p0, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, p1, stride);
    _tile_dpbf16ps(1, 5, 6);
    _tile_loadd(4, p2, stride);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(5, p3, stride);
    _tile_dpbf16ps(3, 5, 6);
    x += kAmxTileBytes;
  };
  for (int64_t b = 0; b < whole; ++b) {
    ahead0.fetch();
    ahead1.fetch();
    step(w0, w0 + half, w1, w1 + half, a.row_bytes);
    w0 += a.step_bytes, w1 += a.step_bytes;
  }
  if (whole < blocks) {
    alignas(64) char rest[4][kAmxTileBytes];
    const int64_t bytes = (a.k - whole * kAmxBlock) * 2;
    copy_rest(w0, a.row_bytes, bytes, rest[0]), copy_rest(w0 + half, a.row_bytes, bytes, rest[1]);
    copy_rest(w1, a.row_bytes, bytes, rest[2]), copy_rest(w1 + half, a.row_bytes, bytes, rest[3]);
    written();
    step(rest[0], rest[1], rest[2], rest[3], kLine);
  }
  alignas(64) float sums[4][256];
  _tile_stored(0, sums[0], kLine);
  _tile_stored(1, sums[1], kLine);
  _tile_stored(2, sums[2], kLine);
  _tile_stored(3, sums[3], kLine);
  turn(sums[0], a.acc[0]), turn(sums[1], a.acc[0] + 16);
  turn(sums[2], a.acc[1]), turn(sums[3], a.acc[1] + 16);
}

/// One chunk, one group of rows of x or two.
///
/// With two groups rows of x are loaded as data that is not needed soon: the chunk stays in the
/// first-level cache for the groups that follow.
template <bool kTwo>
void one_chunk(const AmxArgs& a) {
  const int64_t blocks = (a.k + kAmxBlock - 1) / kAmxBlock, whole = a.k / kAmxBlock;
  const char *x0 = static_cast<const char*>(a.x[0]), *x1 = static_cast<const char*>(a.x[1]);
  const char* w = static_cast<const char*>(a.w[0]);
  const int64_t half = 16 * a.row_bytes;
  Ahead ahead = Ahead::begin(a.next[0], a, blocks);
  alignas(64) float sums[4 * kTile];
  Owned owned{reinterpret_cast<const char*>(sums)};
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  const auto step = [&](const char* p0, const char* p1, int64_t stride)
                        __attribute__((always_inline)) {
    _tile_loadd(4, p0, stride);
    if constexpr (kTwo) {
      _tile_stream_loadd(6, x0, kLine);
    } else {
      _tile_loadd(6, x0, kLine);
    }
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, p1, stride);
    _tile_dpbf16ps(1, 5, 6);
    x0 += kAmxTileBytes;
    if constexpr (kTwo) {
      _tile_stream_loadd(7, x1, kLine);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
      x1 += kAmxTileBytes;
    }
  };
  for (int64_t b = 0; b < whole; ++b) {
    ahead.fetch();
    if constexpr (kTwo) {
      owned.fetch();
    }
    step(w, w + half, a.row_bytes);
    w += a.step_bytes;
  }
  if (whole < blocks) {
    alignas(64) char rest[2][kAmxTileBytes];
    const int64_t bytes = (a.k - whole * kAmxBlock) * 2;
    copy_rest(w, a.row_bytes, bytes, rest[0]), copy_rest(w + half, a.row_bytes, bytes, rest[1]);
    written();
    step(rest[0], rest[1], kLine);
  }
  _tile_stored(0, sums, kLine);
  _tile_stored(1, sums + kTile, kLine);
  if constexpr (kTwo) {
    _tile_stored(2, sums + 2 * kTile, kLine);
    _tile_stored(3, sums + 3 * kTile, kLine);
  }
  turn(sums, a.acc[0]), turn(sums + kTile, a.acc[0] + 16);
  if constexpr (kTwo) {
    turn(sums + 2 * kTile, a.acc[1]), turn(sums + 3 * kTile, a.acc[1] + 16);
  }
}

/// 16 rows of a block of k as a right operand.
RM_INLINE void place(const char* src, int64_t row_bytes, int64_t bytes, char* dst) {
  vu square[kWidth];
  if (bytes >= kLine) {
    load_square(reinterpret_cast<const uint16_t*>(src), row_bytes / 2, square);
  } else {
    alignas(64) char rest[kAmxTileBytes];
    copy_rest(src, row_bytes, bytes, rest);
    load_square(reinterpret_cast<const uint16_t*>(rest), kLine / 2, square);
  }
  transpose(square);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    F32::store(reinterpret_cast<float*>(dst + i * kLine), (vf)square[i]);
  }
}

void copy(const AmxCopy& a) {
  auto* dst = static_cast<char*>(a.dst);
  for (int64_t b = a.begin; b < a.end; ++b, dst += 2 * kAmxTileBytes) {
    const char* src = static_cast<const char*>(a.src) + b * kLine;
    const int64_t left = (a.k - b * kAmxBlock) * 2;
    place(src, a.row_bytes, left, dst);
    place(src + 16 * a.row_bytes, a.row_bytes, left, dst + kAmxTileBytes);
  }
}

/// What is asked for while tiles are multiplied, a share of it a block of k.
struct Meanwhile {
  char* c;
  int64_t c_row_bytes, c_left, c_each;
  const char* ahead;
  int64_t ahead_row_bytes, ahead_rows;

  RM_INLINE Meanwhile begin(const AmxNear& a) {
    return {a.c, a.c_row_bytes, a.c_rows, (a.c_rows + a.blocks - 1) / a.blocks,
            static_cast<const char*>(a.ahead), a.ahead_row_bytes, a.ahead_rows};
  }
  inline __attribute__((always_inline)) void fetch() {
    const int64_t lines = imin(c_each, c_left);
    for (int64_t i = 0; i < lines; ++i, c += c_row_bytes) __builtin_prefetch(c, 1, 3);
    c_left -= lines;
    for (int64_t r = 0; r < ahead_rows; ++r) __builtin_prefetch(ahead + r * ahead_row_bytes, 0, 2);
    ahead += kLine;
  }
};

/// Tiles 0 and 1 are sums of the first group, 2 and 3 of the second, 4 and 5 the weight, 6 and 7 rows
/// of x. These are loaded as data that is not needed soon: the part of the weight stays in the
/// first-level cache for the groups that follow.
template <bool kTwo>
void near_part(const AmxNear& a) {
  const char *x = static_cast<const char*>(a.x), *w = static_cast<const char*>(a.w);
  const int64_t second = 16 * a.x_row_bytes;
  const bool partly = a.continues || a.more;
  written();
  if (a.continues) {
    _tile_loadd(0, a.partial, kLine);
    _tile_loadd(1, a.partial + kTile, kLine);
    if constexpr (kTwo) {
      _tile_loadd(2, a.partial + 2 * kTile, kLine);
      _tile_loadd(3, a.partial + 3 * kTile, kLine);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  Meanwhile meanwhile = Meanwhile::begin(a);
  Owned owned{reinterpret_cast<const char*>(partly ? a.partial + kAmxPartial : a.acc)};
  for (int64_t b = 0; b < a.blocks; ++b, x += kLine, w += 2 * kAmxTileBytes) {
    meanwhile.fetch();
    if constexpr (kTwo) owned.fetch();
    _tile_loadd(4, w, kLine);
    _tile_stream_loadd(6, x, a.x_row_bytes);
    _tile_dpbf16ps(0, 6, 4);
    _tile_loadd(5, w + kAmxTileBytes, kLine);
    _tile_dpbf16ps(1, 6, 5);
    if constexpr (kTwo) {
      _tile_stream_loadd(7, x + second, a.x_row_bytes);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 7, 5);
    }
  }
  float* to = a.more ? a.partial : a.acc;
  const int64_t row = a.more ? kLine : kAmxColumns * 4, right = a.more ? kTile : kAmxRows;
  _tile_stored(0, to, row);
  _tile_stored(1, to + right, row);
  if constexpr (kTwo) {
    float* below = to + kAmxPartial / 2;
    _tile_stored(2, below, row);
    _tile_stored(3, below + right, row);
  }
  written();
}

void multiply_near(const AmxNear& a) { a.two ? near_part<true>(a) : near_part<false>(a); }

void multiply(const AmxArgs& a) {
  if (a.w[1] != nullptr) return two_chunks(a);
  return a.x[1] != nullptr ? one_chunk<true>(a) : one_chunk<false>(a);
}

/// `count` elements of a row of x, zeros up to a block.
RM_INLINE void gather(const uint16_t* src, int64_t stride, int64_t count, uint16_t* block) {
  __builtin_memset(block, 0, kLine);
  if (stride == 1) {
    __builtin_memcpy(block, src, static_cast<size_t>(count) * sizeof *block);
  } else {
    for (int64_t j = 0; j < count; ++j) block[j] = src[j * stride];
  }
}

void spread(const AmxSpread& a) {
  const int64_t blocks = (a.k + kAmxBlock - 1) / kAmxBlock;
  for (int64_t unit = a.begin; unit < a.end; ++unit) {
    const int64_t row = unit / blocks * kAmxRows, k = unit % blocks * kAmxBlock;
    const int64_t rows = imin(kAmxRows, a.m - row), count = imin(kAmxBlock, a.k - k);
    const auto* src =
        static_cast<const uint16_t*>(a.src) + row * a.row_stride + k * a.col_stride;
    vu square[kWidth];
    if (rows == kAmxRows && count == kAmxBlock && a.col_stride == 1) {
      load_square(src, a.row_stride, square);
    } else {
      for (int i = 0; i < kWidth; ++i) {
        uint16_t block[kAmxBlock];
        gather(src + i * a.row_stride, a.col_stride, i < rows ? count : 0, block);
        square[i] = load_bits(block);
      }
    }
    transpose(square);
    auto* dst = static_cast<float*>(a.dst) + unit * (kAmxTileBytes / 4);
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) F32::store(dst + i * kWidth, (vf)square[i]);
  }
}

constexpr AmxSet make_set() {
  AmxSet set{open, multiply, close, spread, copy, multiply_near, {}};
  fill_narrow<kActivations - 1>(set.store);
  return set;
}

}  // namespace

extern constinit const AmxSet amx_kernels = make_set();

}  // namespace rm::cpu::gemm::RM_ISA
