// Register-blocked products of f32 for attention, inside ISA sources: their right operand lies in
// panels of kPanel columns, or in rows of a multiple of them.
#pragma once

#include "common/row_pointers.hpp"
#include "common/transpose.hpp"
#include "common/vec.hpp"

namespace rm::cpu::RM_ISA {
namespace {

constexpr int64_t kPanel = 2 * kWidth;             // columns a microkernel makes
constexpr int kRows = RM_ISA_LEVEL >= 2 ? 12 : 6;  // rows a microkernel makes

RM_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/// c[M][kPanel] (+)= a[M][depth] * b[depth][kPanel]; kTransposed: a lies as [depth][M].
template <bool kTransposed, int M>
void product(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* c,
             int64_t ldc, bool accumulate) {
  vf acc[M][2];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    acc[m][0] = accumulate ? vload(c + m * ldc) : vf{};
    acc[m][1] = accumulate ? vload(c + m * ldc + kWidth) : vf{};
  }
  const auto step = [&](const auto& left, int k) __attribute__((always_inline)) {
    const vf b0 = vload(b + k * ldb), b1 = vload(b + k * ldb + kWidth);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const float s = left(m, k);
      acc[m][0] += s * b0;
      acc[m][1] += s * b1;
    }
  };
  if constexpr (kTransposed) {
    for (int64_t i = 0; i < depth; ++i, a += lda, b += ldb) {
      step([&](int m, int) { return a[m]; }, 0);
    }
  } else {
    RowPointers<M> rows(a, lda);
    const auto at = [&](int m, int k) __attribute__((always_inline)) { return rows.get(m, k); };
    int64_t i = 0;
    for (; i + 2 <= depth; i += 2, b += 2 * ldb) {
      step(at, 0);
      step(at, 1);
      rows.advance(2);
    }
    if (i < depth) step(at, 0);
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    vstore(c + m * ldc, acc[m][0]);
    vstore(c + m * ldc + kWidth, acc[m][1]);
  }
}

using Product = void (*)(const float*, int64_t, const float*, int64_t, int64_t, float*, int64_t,
                         bool);
template <bool kTransposed>
constexpr Product kProducts[] = {
    nullptr,
    product<kTransposed, 1>,
    product<kTransposed, 2>,
    product<kTransposed, 3>,
    product<kTransposed, 4>,
    product<kTransposed, 5>,
    product<kTransposed, 6>,
#if RM_ISA_LEVEL >= 2
    product<kTransposed, 7>,
    product<kTransposed, 8>,
    product<kTransposed, 9>,
    product<kTransposed, 10>,
    product<kTransposed, 11>,
    product<kTransposed, 12>
#endif
};

/// rows x columns (a multiple of kPanel) of c, panel by panel so that one panel of b stays in L1.
/// Panel p of b begins at b + p * panel_stride.
template <bool kTransposed = false>
RM_INLINE void multiply(const float* a, int64_t lda, const float* b, int64_t ldb,
                        int64_t panel_stride, int64_t rows, int64_t columns, int64_t depth,
                        float* c, int64_t ldc, bool accumulate) {
  const int64_t step = kTransposed ? 1 : lda;
  for (int64_t p = 0; p * kPanel < columns; ++p) {
    for (int64_t i = 0; i < rows; i += kRows) {
      kProducts<kTransposed>[imin(kRows, rows - i)](a + i * step, lda, b + p * panel_stride, ldb,
                                                    depth, c + i * ldc + p * kPanel, ldc,
                                                    accumulate);
    }
  }
}

/// Keys [0, n) of k as panels [panel][d][kPanel]; columns past n are zero.
template <class T>
void pack_keys(const T* k, int64_t row, int64_t column, int64_t n, int64_t d, float* out) {
  for (int64_t j0 = 0; j0 < n; j0 += kWidth) {
    float* panel = out + j0 / kPanel * kPanel * d + j0 % kPanel;
    const int64_t keys = imin(kWidth, n - j0);
    int64_t i = 0;
    if (column == 1 && keys == kWidth) {
      for (; i + kWidth <= d; i += kWidth) {
        vf r[kWidth];
        for (int j = 0; j < kWidth; ++j) r[j] = vload(k + (j0 + j) * row + i);
        transpose_square<vi>(r);
        for (int j = 0; j < kWidth; ++j) vstore(panel + (i + j) * kPanel, r[j]);
      }
    }
    for (; i < d; ++i) {
      for (int64_t j = 0; j < kWidth; ++j) {
        panel[i * kPanel + j] = j < keys ? widen(k[(j0 + j) * row + i * column]) : 0.0f;
      }
    }
  }
  if (round_up(n, kPanel) - round_up(n, kWidth) == kWidth) {
    float* panel = out + n / kPanel * kPanel * d + kWidth;
    for (int64_t i = 0; i < d; ++i) vstore(panel + i * kPanel, vf{});
  }
}

}  // namespace
}  // namespace rm::cpu::RM_ISA
