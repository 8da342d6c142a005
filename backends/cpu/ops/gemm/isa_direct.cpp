// Products of few rows with a weight as it lies in memory ([N, K], K dense), for one ISA.
//
// Bound by reading the weight once. 16-bit weights are widened in registers: bf16 comes apart into
// even and odd elements with a shift and a mask, so x is stored in that order. With AVX512-BF16 both
// stay as they are, and an instruction multiplies pairs.
#include "common/sum_lanes.hpp"
#include "ops/gemm/direct_kernels.hpp"
#include "ops/gemm/elements.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

template <int T>
struct Weight;

/// Elements as floats: a block is two vectors, of x as well.
struct Widened {
  static constexpr int kParts = 2;
  RM_INLINE vf add_product(vf sum, vf w, vf x) { return sum + w * x; }
};

/// load(): kParts vectors with a block of consecutive elements of a row; x goes through the same
/// load, so any order will do. kAhead: prefetch distance in bytes, 0 where the hardware's own is as
/// good (measured).
template <>
struct Weight<kF32> : Widened {
  using Scalar = float;
  static constexpr int kAhead = 0;
  RM_INLINE void load(const float* p, vf* v) {
    v[0] = F32::load(p);
    v[1] = F32::load(p + kWidth);
  }
};
#if defined(__AVX512BF16__)
template <>
struct Weight<kBF16> {
  using Scalar = uint16_t;
  static constexpr int kAhead = 1024;
  static constexpr int kParts = 1;
  RM_INLINE void load(const uint16_t* p, vf* v) {
    v[0] = (vf)load_bits(p);
  }
  RM_INLINE vf add_product(vf sum, vf w, vf x) {
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
  }
};
#else
template <>
struct Weight<kBF16> : Widened {
  using Scalar = uint16_t;
  static constexpr int kAhead = 1024;
  RM_INLINE void load(const uint16_t* p, vf* v) {
    const vu both = load_bits(p);
    v[0] = (vf)(both << 16);
    v[1] = (vf)(both & 0xffff0000);
  }
};
#endif
template <>
struct Weight<kF16> : Widened {
  using Scalar = uint16_t;
  static constexpr int kAhead = 1024;
  RM_INLINE void load(const uint16_t* p, vf* v) {
    v[0] = F16::load(p);
    v[1] = F16::load(p + kWidth);
  }
};

constexpr int kBlock = 2 * kWidth;  // elements of a load()

/// Floats that hold `elements` of a row of x: those of whole blocks.
template <int T>
constexpr int64_t x_floats(int64_t elements) {
  return elements / 2 * Weight<T>::kParts;
}

/// What is prefetched: nothing, a little ahead into the first-level cache, or into the second-level
/// cache what comes when these rows are done with.
enum class Fetch { none, near, next_block };

/// A row of x is loaded once a block, not folded into each multiply-add as the compiler would: the
/// load ports are what M > 2 is short of.
RM_INLINE vf load_once(const float* x) {
  vf v = F32::load(x);
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__SSE2__)
  asm("" : "+x"(v));
#endif
  return v;
}

/// One block of k: R rows times M rows of x.
template <class W, int R, int M>
RM_INLINE void add_products(vf (&sum)[R][M], const vf (&v)[R][W::kParts], const float* x,
                            int64_t ldx) {
#pragma GCC unroll 2
  for (int h = 0; h < W::kParts; ++h) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) {
      const vf xi = load_once(x + i * ldx + h * kWidth);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[r][i] = W::add_product(sum[r][i], v[r][h], xi);
    }
  }
}

/// Elements [begin, end) of k, and how far from what is read to prefetch, in bytes.
struct Piece {
  int64_t begin, end, ahead;
};

/// A piece of R rows times M rows of x, added to acc unless it is the first.
template <int T, int R, int M, Fetch kFetch>
RM_INLINE void dot_tile(const float* x, int64_t ldx, const typename Weight<T>::Scalar* const* w,
                        const Piece& piece, float* const* acc, int64_t acc_step) {
  using W = Weight<T>;
  vf sum[R][M];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < M; ++i) sum[r][i] = vf{};
  }
  int64_t at = piece.begin;
  const int64_t k = piece.end;
  // A prefetch a line of memory: as many blocks at a step as make one.
  constexpr int kBlocks = 64 / int(kBlock * sizeof(typename W::Scalar)) > 1 ? 2 : 1;
  for (; at + kBlocks * kBlock <= k; at += kBlocks * kBlock) {
    if constexpr (kFetch != Fetch::none) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        __builtin_prefetch(reinterpret_cast<const char*>(w[r] + at) + piece.ahead, 0,
                           kFetch == Fetch::next_block ? 2 : 3);
      }
    }
#pragma GCC unroll 2
    for (int b = 0; b < kBlocks; ++b) {
      vf v[R][W::kParts];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) W::load(w[r] + at + b * kBlock, v[r]);
      add_products<W, R, M>(sum, v, x + x_floats<T>(at + b * kBlock), ldx);
    }
  }
  for (; at + kBlock <= k; at += kBlock) {
    vf v[R][W::kParts];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) W::load(w[r] + at, v[r]);
    add_products<W, R, M>(sum, v, x + x_floats<T>(at), ldx);
  }
  if (at < k) {
    vf v[R][W::kParts];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      typename W::Scalar rest[kBlock] = {};
      __builtin_memcpy(rest, w[r] + at, static_cast<size_t>(k - at) * sizeof(*rest));
      W::load(rest, v[r]);
    }
    add_products<W, R, M>(sum, v, x + x_floats<T>(at), ldx);
  }
#pragma GCC unroll 16
  for (int first = 0; first < R * M; first += 8) {
    vf eight[8] = {};
    float sums[8];
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
      if (first + s < R * M) eight[s] = sum[(first + s) / M][(first + s) % M];
    }
    cpu::RM_ISA::sum_eight(eight, sums);
#pragma GCC unroll 8
    for (int s = 0; s < 8; ++s) {
      if (first + s >= R * M) continue;
      float* to = acc[(first + s) / M] + (first + s) % M * acc_step;
      *to = piece.begin == 0 ? sums[s] : *to + sums[s];
    }
  }
}

#if defined(__AVX512F__)
constexpr int kMostTile = 6;
constexpr int64_t kFetchless = 0;
/// Rows of the weight a tile of m rows of x takes: the sums must fit the registers.
constexpr int rows_at_once(int) { return 4; }
#else
constexpr int kMostTile = 4;
constexpr int64_t kFetchless = 2;  // tiles of x up to which the hardware's fetching is as good, too
constexpr int rows_at_once(int m) { return m <= 2 ? 4 : 2; }
#endif
static_assert(kStreams == 4);
constexpr int64_t kNearBytes = 48 << 10;  // of weights: two blocks fit the second-level cache
constexpr int64_t kPiece = 1024;          // elements of k: a tile's rows of x stay in the first

template <int T, int M, Fetch kFetch>
RM_INLINE void dot_streams(const DotArgs& a, int64_t i0, int64_t j, const Piece& piece) {
  using S = typename Weight<T>::Scalar;
  constexpr int R = rows_at_once(M);
#pragma GCC unroll 2
  for (int s = 0; s < kStreams; s += R) {
    const S* w[R];
    float* acc[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      w[r] = reinterpret_cast<const S*>(a.w[s + r] + j * a.row_bytes);
      acc[r] = a.acc[s + r] + i0 * a.acc_step + j;
    }
    dot_tile<T, R, M, kFetch>(a.x + i0 * a.ldx, a.ldx, w, piece, acc, a.acc_step);
  }
}

/// Rows [j0, j1) of every stream times m <= M rows of x.
template <int T, int M, Fetch kFetch>
RM_INLINE void dot_rows(const DotArgs& a, int64_t i0, int64_t m, int64_t j0, int64_t j1,
                        const Piece& piece) {
  if constexpr (M > 0) {
    if (m < M) return dot_rows<T, M - 1, kFetch>(a, i0, m, j0, j1, piece);
    for (int64_t j = j0; j < j1; ++j) dot_streams<T, M, kFetch>(a, i0, j, piece);
  }
}

RM_INLINE int64_t piece_end(const DotArgs& a, int64_t begin) {
  return begin + kPiece < a.k ? begin + kPiece : a.k;
}

/// One row of x: every weight is used once, in the order of memory.
template <int T>
void dot_one(const DotArgs& a) {
  constexpr int64_t kAhead = Weight<T>::kAhead;
  for (int64_t j = 0; j < a.count; ++j) {
    for (int64_t k = 0; k == 0 || k < a.k; k += kPiece) {
      dot_streams<T, 1, kAhead != 0 ? Fetch::near : Fetch::none>(a, 0, j,
                                                                 {k, piece_end(a, k), kAhead});
    }
  }
}

/// Tiles of x after the first find a block of rows in the second-level cache. The last one has the
/// next block fetched meanwhile: the memory must not wait for multiply-adds. (Few tiles of float32
/// leave the hardware the time: 1.1 to 1.2 times as fast with 2 to 8 rows on Zen 3.)
template <int T>
void dot(const DotArgs& a) {
  if (a.m == 1) return dot_one<T>(a);
  const int64_t tiles = (a.m + kMostTile - 1) / kMostTile;
  const bool alone = Weight<T>::kAhead == 0 && tiles <= kFetchless;
  const int64_t fit = kNearBytes / (kStreams * a.row_bytes + 1);
  const int64_t block = fit < 1 ? 1 : fit < a.count ? fit : a.count;
  for (int64_t j0 = 0; j0 < a.count; j0 += block) {
    const int64_t j1 = j0 + block < a.count ? j0 + block : a.count;
    for (int64_t k = 0; k == 0 || k < a.k; k += kPiece) {
      const Piece piece{k, piece_end(a, k), block * a.row_bytes};
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t i0 = a.m * t / tiles, m = a.m * (t + 1) / tiles - i0;
        if (t + 1 < tiles || alone) {
          dot_rows<T, kMostTile, Fetch::none>(a, i0, m, j0, j1, piece);
        } else {
          dot_rows<T, kMostTile, Fetch::next_block>(a, i0, m, j0, j1, piece);
        }
      }
    }
  }
}

template <int T>
void spread(const SpreadArgs& a) {
  using W = Weight<T>;
  using S = typename W::Scalar;
  for (int64_t i = 0; i < a.m; ++i) {
    const S* src = static_cast<const S*>(a.src) + i * a.row_stride;
    float* dst = a.dst + i * a.ldx;
    for (int64_t k = 0; k < a.k; k += kBlock) {
      const int64_t count = a.k - k < kBlock ? a.k - k : kBlock;
      S block[kBlock] = {};
      if (a.col_stride == 1) {
        __builtin_memcpy(block, src + k, static_cast<size_t>(count) * sizeof(S));
      } else {
        for (int64_t j = 0; j < count; ++j) block[j] = src[(k + j) * a.col_stride];
      }
      vf v[W::kParts];
      W::load(block, v);
      for (int h = 0; h < W::kParts; ++h) F32::store(dst + x_floats<T>(k) + h * kWidth, v[h]);
    }
  }
}

constexpr DirectSet make_direct_set() {
  DirectSet set{};
  set.tile_rows = kMostTile;
  set.tile_columns[0] = rows_at_once(1), set.tile_columns[1] = rows_at_once(kMostTile);
  set.block = kBlock;
  set.piece = kPiece;
  set.dot[kF32] = dot<kF32>;
  set.dot[kBF16] = dot<kBF16>;
  set.dot[kF16] = dot<kF16>;
  set.spread[kF32] = spread<kF32>;
  set.spread[kBF16] = spread<kBF16>;
  set.spread[kF16] = spread<kF16>;
  return set;
}

}  // namespace

extern constinit const DirectSet direct_kernels = make_direct_set();

}  // namespace rm::cpu::gemm::RM_ISA
