// The gemm kernels of one instruction set: compiled once per RM_ISA with that set's -m flags.
//
// A tile of b is two vectors wide and stays in registers together with its accumulators; a is read
// by broadcast. 16-bit panels are widened on the fly.
#include "common/row_pointers.hpp"
#include "ops/gemm/epilogue.hpp"
#include "ops/gemm/transpose.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kMr = 14;
#elif defined(__AVX2__)
constexpr int kMr = 6;
#else
constexpr int kMr = 4;
#endif

/// Few rows take several panels at once: enough independent chains to hide the latency of an FMA.
constexpr int wide_panels(int rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

/// Panel element order: f32 and f16 as they come; bf16 with column j in the low and column
/// j + kWidth in the high half of word j, so that a shift and a mask widen a whole row.
template <int T>
struct Panel;

template <>
struct Panel<kF32> {
  using Scalar = float;
  RM_INLINE void load(const float* p, vf& lo, vf& hi) {
    lo = F32::load(p);
    hi = F32::load(p + kWidth);
  }
};
template <>
struct Panel<kBF16> {
  using Scalar = uint16_t;
  RM_INLINE void load(const uint16_t* p, vf& lo, vf& hi) {
    const vu both = load_bits(p);
    lo = (vf)(both << 16);
    hi = (vf)(both & 0xffff0000);
  }
};
template <>
struct Panel<kF16> {
  using Scalar = uint16_t;
  RM_INLINE void load(const uint16_t* p, vf& lo, vf& hi) {
    lo = F16::load(p);
    hi = F16::load(p + kWidth);
  }
};

/// Rows of a as they lie.
template <int MR, bool kColumns>
struct LeftOf : RowPointers<MR> {
  RM_MEMBER explicit LeftOf(const TileArgs& args)
      : RowPointers<MR>(static_cast<const float*>(args.a), args.lda) {}
};
/// a as [k][kWidth]: one line a step.
template <int MR>
struct LeftOf<MR, true> {
  RM_MEMBER explicit LeftOf(const TileArgs& args) : at(static_cast<const float*>(args.a)) {}
  RM_MEMBER float get(int row, int k) const { return at[k * kWidth + row]; }
  RM_MEMBER void advance(int k) { at += k * kWidth; }
  const float* at;
};

/// Step `k` behind where a and the panels stand.
template <int T, int MR, int NP, class Left>
RM_INLINE void multiply_add(const Left& a, const char* b, int64_t panel_bytes, int k,
                            vf (&acc)[MR][NP][2]) {
  using S = typename Panel<T>::Scalar;
  vf lo[NP], hi[NP];
#pragma GCC unroll 4
  for (int p = 0; p < NP; ++p) {
    Panel<T>::load(reinterpret_cast<const S*>(b + p * panel_bytes) + k * kNr, lo[p], hi[p]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
    const vf x = vset(a.get(i, k));
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      acc[i][p][0] += x * lo[p];
      acc[i][p][1] += x * hi[p];
    }
  }
}

/// kColumns: a lies as [k][kWidth], one line a step, else as rows.
template <int T, int MR, int NP, bool kColumns = false>
void tile(const TileArgs& args) {
  constexpr int64_t kStepBytes = kNr * sizeof(typename Panel<T>::Scalar);
  vf acc[MR][NP][2];
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      const float* src = args.acc + p * args.acc_panel + i * kNr;
      acc[i][p][0] = args.accumulate ? F32::load(src) : vf{};
      acc[i][p][1] = args.accumulate ? F32::load(src + kWidth) : vf{};
    }
  }
  LeftOf<MR, kColumns> a(args);
  const char* b = static_cast<const char*>(args.b);
  const char* ahead = args.ahead;
  int64_t k = 0;
  for (; k + 2 <= args.steps; k += 2) {
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(ahead + args.ahead_step, 0, 2);
    ahead += 2 * args.ahead_step;
    multiply_add<T, MR, NP>(a, b, args.b_panel_bytes, 0, acc);
    multiply_add<T, MR, NP>(a, b, args.b_panel_bytes, 1, acc);
    a.advance(2);
    b += 2 * kStepBytes;
  }
  if (k < args.steps) {
    __builtin_prefetch(ahead, 0, 2);
    multiply_add<T, MR, NP>(a, b, args.b_panel_bytes, 0, acc);
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < NP; ++p) {
      float* dst = args.acc + p * args.acc_panel + i * kNr;
      F32::store(dst, acc[i][p][0]);
      F32::store(dst + kWidth, acc[i][p][1]);
    }
  }
}

/// Where column j of a panel row is stored.
template <int T>
constexpr int slot(int j) {
  return T == kBF16 ? (j < kWidth ? 2 * j : 2 * (j - kWidth) + 1) : j;
}

/// One panel, element by element.
template <int T>
void pack_panel(const PackArgs& args, const typename Panel<T>::Scalar* src, int cols,
                typename Panel<T>::Scalar* dst) {
  if (cols < kNr) __builtin_memset(dst, 0, static_cast<size_t>(args.k) * kNr * sizeof(*dst));
  // Blocks of k keep the rows of a transposed source in the first-level cache.
  for (int64_t k0 = 0; k0 < args.k; k0 += 16) {
    const int64_t k1 = k0 + 16 < args.k ? k0 + 16 : args.k;
    for (int j = 0; j < cols; ++j) {
      for (int64_t k = k0; k < k1; ++k) dst[k * kNr + slot<T>(j)] = src[k * args.ks + j * args.ns];
    }
  }
}

/// A full panel of a source that is dense along k, squares of kWidth words at a time; returns how
/// many values of k it did.
RM_INLINE int64_t pack_squares(const PackArgs& args, const float* src, float* dst) {
  int64_t k = 0;
  for (; k + kWidth <= args.k; k += kWidth) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      vu square[kWidth];
      load_square(src + half * kWidth * args.ns + k, args.ns, square);
      transpose(square);
      for (int i = 0; i < kWidth; ++i) {
        store_bits(dst + (k + i) * kNr + half * kWidth, square[i]);
      }
    }
  }
  return k;
}
/// bf16: a word holds two values of k before the transposition and two columns after it.
RM_INLINE int64_t pack_squares(const PackArgs& args, const uint16_t* src, uint16_t* dst) {
  int64_t k = 0;
  for (; k + 2 * kWidth <= args.k; k += 2 * kWidth) {
    vu low[kWidth], high[kWidth];
    load_square(src + k, args.ns, low);
    load_square(src + kWidth * args.ns + k, args.ns, high);
    transpose(low);
    transpose(high);
    for (int i = 0; i < kWidth; ++i) {
      uint16_t* row = dst + (k + 2 * i) * kNr;
      store_bits(row, (low[i] & 0xffff) | high[i] << 16);
      store_bits(row + kNr, low[i] >> 16 | (high[i] & 0xffff0000));
    }
  }
  return k;
}

/// A row of a full panel whose columns lie side by side in b.
template <int T>
RM_INLINE void pack_row(const typename Panel<T>::Scalar* src, typename Panel<T>::Scalar* dst) {
  if constexpr (T == kF32) {
    F32::store(dst, F32::load(src));
    F32::store(dst + kWidth, F32::load(src + kWidth));
  } else if constexpr (T == kBF16) {
    store_bits(dst, (vu)BF16::load(src) >> 16 | (vu)BF16::load(src + kWidth));
  } else {
    store_bits(dst, load_bits(src));
  }
}

/// Full panels of a source that is dense along n. Its rows lie far apart, which no prefetcher of the
/// hardware follows: a few panels at once read whole lines of each, and rows are asked for ahead.
template <int T>
void pack_rows(const PackArgs& args, int64_t begin, int64_t end) {
  using S = typename Panel<T>::Scalar;
  constexpr int64_t kTogether = 8, kAhead = 16;  // panels, rows
  for (int64_t first = begin; first < end; first += kTogether) {
    const int64_t last = first + kTogether < end ? first + kTogether : end;
    for (int64_t k = 0; k < args.k; ++k) {
      const S* src = static_cast<const S*>(args.src) + k * args.ks;
      for (int64_t panel = first; panel < last; ++panel) {
        __builtin_prefetch(src + kAhead * args.ks + panel * kNr, 0, 2);
        S* dst = static_cast<S*>(args.dst) + (panel - args.panel_begin) * args.k * kNr;
        pack_row<T>(src + panel * kNr, dst + k * kNr);
      }
    }
  }
}

template <int T>
void pack(const PackArgs& args) {
  using S = typename Panel<T>::Scalar;
  int64_t begin = args.panel_begin;
  if (args.ns == 1) {
    const int64_t full = args.n / kNr, end = full < args.panel_end ? full : args.panel_end;
    pack_rows<T>(args, begin, end);
    if (begin < end) begin = end;
  }
  for (int64_t panel = begin; panel < args.panel_end; ++panel) {
    S* dst = static_cast<S*>(args.dst) + (panel - args.panel_begin) * args.k * kNr;
    const int64_t n0 = panel * kNr;
    const int cols = static_cast<int>(args.n - n0 < kNr ? args.n - n0 : kNr);
    const S* src = static_cast<const S*>(args.src) + n0 * args.ns;
    int64_t done = 0;
    if constexpr (T != kF16) {  // f16 panels are in the order of columns: no words to transpose
      if (args.ks == 1 && cols == kNr) done = pack_squares(args, src, dst);
    }
    PackArgs rest = args;
    rest.k = args.k - done;
    pack_panel<T>(rest, src + done * args.ks, cols, dst + done * kNr);
  }
}

/// Rows of f32 that lie side by side, as those of a transposed operand do: squares of kWidth, so that every
/// line is read once. Squares of neighbouring lines follow each other, because the next value of a row may lie
/// a page further: a product of [1024, 1024] transposed x [1024, 256] takes a tenth less time than with squares
/// along the rows. Returns how many rows it did.
RM_INLINE int64_t widen_squares(const WidenArgs& args) {
  const auto* src = static_cast<const float*>(args.src);
  auto* dst = static_cast<float*>(args.dst);
  const int64_t rows = args.rows / kWidth * kWidth;
  int64_t k = 0;
  for (; k + kWidth <= args.cols; k += kWidth) {
    for (int64_t i = 0; i < rows; i += kWidth) {
      vu square[kWidth];
      load_square(src + k * args.col_stride + i, args.col_stride, square);
      transpose(square);
      for (int r = 0; r < kWidth; ++r) store_bits(dst + (i + r) * args.dst_stride + k, square[r]);
    }
  }
  for (; k < args.cols; ++k) {
    for (int64_t i = 0; i < rows; ++i) dst[i * args.dst_stride + k] = src[k * args.col_stride + i];
  }
  return rows;
}

template <class A>
void widen(const WidenArgs& args) {
  using S = typename A::Scalar;
  int64_t done = 0;
  if constexpr (sizeof(S) == sizeof(float)) {
    if (args.row_stride == 1 && args.col_stride != 1) done = widen_squares(args);
  }
  for (int64_t i = done; i < args.rows; ++i) {
    const S* src = static_cast<const S*>(args.src) + i * args.row_stride;
    float* dst = static_cast<float*>(args.dst) + i * args.dst_stride;
    if (args.col_stride == 1) {
      int64_t k = 0;
      for (; k + kWidth <= args.cols; k += kWidth) F32::store(dst + k, A::load(src + k));
      if (k < args.cols) {
        S rest[kWidth] = {};
        __builtin_memcpy(rest, src + k, static_cast<size_t>(args.cols - k) * sizeof(S));
        float wide[kWidth];
        F32::store(wide, A::load(rest));
        __builtin_memcpy(dst + k, wide, static_cast<size_t>(args.cols - k) * sizeof(float));
      }
      continue;
    }
    for (int64_t k = 0; k < args.cols; k += kWidth) {
      const int count = static_cast<int>(args.cols - k < kWidth ? args.cols - k : kWidth);
      S rest[kWidth] = {};
      for (int j = 0; j < count; ++j) rest[j] = src[(k + j) * args.col_stride];
      float wide[kWidth];
      F32::store(wide, A::load(rest));
      __builtin_memcpy(dst + k, wide, static_cast<size_t>(count) * sizeof(float));
    }
  }
}

/// Rows of a transposed a lie side by side: a line of each value of k goes to each tile as it is. The lines lie
/// far apart, so they are asked for ahead.
template <class A>
void columns(const ColumnsArgs& args) {
  static_assert(kMr <= kWidth);
  using S = typename A::Scalar;
  constexpr int64_t kAhead = 8, kLine = 64 / sizeof(S);
  for (int64_t k = 0; k < args.cols; ++k) {
    const S* src = static_cast<const S*>(args.src) + k * args.col_stride;
    if (k + kAhead < args.cols) {
      const S* ahead = src + kAhead * args.col_stride;
      for (int64_t i = 0; i < args.rows; i += kLine) __builtin_prefetch(ahead + i, 0, 2);
    }
    float* dst = args.dst + k * kWidth;
    for (int64_t t = 0; t < args.tiles; ++t, dst += args.tile_stride) {
      const int64_t r0 = args.rows * t / args.tiles;
      if (args.last && k + 1 == args.cols && r0 + kWidth > args.rows) {
        const int64_t r1 = args.rows * (t + 1) / args.tiles;
        S rest[kWidth] = {};
        __builtin_memcpy(rest, src + r0, static_cast<size_t>(r1 - r0) * sizeof(S));
        F32::store(dst, A::load(rest));
      } else {
        F32::store(dst, A::load(src + r0));
      }
    }
  }
}

template <int T, int MR>
constexpr void fill_tiles(KernelSet& set) {
  set.tile[T][MR - 1][0] = tile<T, MR, 1>;
  set.tile[T][MR - 1][1] = tile<T, MR, wide_panels(MR)>;
  set.wide[MR - 1] = wide_panels(MR);
  set.column_tile[T][MR - 1] = tile<T, MR, 1, true>;
  if constexpr (MR > 1) fill_tiles<T, MR - 1>(set);
}

constexpr KernelSet make_kernel_set() {
  KernelSet set{};
#if defined(__AVX512F__)
  // From the second-level cache: a tile takes 13 bytes a cycle, and sums are read and written less often
  // than with blocks in the first level.
  set.block_bytes = 96 << 10;
  set.sums_bytes = 320 << 10;
  set.layout[kF32] = "packed-f32-n32";
  set.layout[kBF16] = "packed-bf16-n32-w16";
  set.layout[kF16] = "packed-f16-n32";
#elif defined(__AVX2__)
  set.block_bytes = 16 << 10;  // half of the first-level cache
  set.sums_bytes = 160 << 10;
  set.layout[kF32] = "packed-f32-n16";
  set.layout[kBF16] = "packed-bf16-n16-w8";
  set.layout[kF16] = "packed-f16-n16";
#else
  set.block_bytes = 12 << 10;
  set.sums_bytes = 160 << 10;
  set.layout[kF32] = "packed-f32-n8";
  set.layout[kBF16] = "packed-bf16-n8-w4";
  set.layout[kF16] = "packed-f16-n8";
#endif
  set.mr = kMr;
  set.nr = kNr;
  set.step = 1;
  set.a_element_bytes = 4;
  set.panel_element_bytes[kF32] = 4;
  set.panel_element_bytes[kBF16] = set.panel_element_bytes[kF16] = 2;
  fill_tiles<kF32, kMr>(set);
  fill_tiles<kBF16, kMr>(set);
  fill_tiles<kF16, kMr>(set);
  fill_stores<F32, kActivations - 1>(set.store[kF32]);
  fill_stores<BF16, kActivations - 1>(set.store[kBF16]);
  fill_stores<F16, kActivations - 1>(set.store[kF16]);
  set.pack[kF32] = pack<kF32>;
  set.pack[kBF16] = pack<kBF16>;
  set.pack[kF16] = pack<kF16>;
  set.widen[kF32] = widen<F32>;
  set.widen[kBF16] = widen<BF16>;
  set.widen[kF16] = widen<F16>;
  set.column_width = kWidth;
  set.columns[kF32] = columns<F32>;
  set.columns[kBF16] = columns<BF16>;
  set.columns[kF16] = columns<F16>;
  return set;
}

}  // namespace

// constinit: nothing of this file may run before the instruction set has been checked.
extern constinit const KernelSet gemm_kernels = make_kernel_set();

}  // namespace rm::cpu::gemm::RM_ISA
