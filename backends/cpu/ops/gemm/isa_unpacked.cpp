// Products with a b that is read where it lies, for one ISA: tiles of a few rows by two vectors.
#include "common/vec.hpp"
#include "ops/gemm/unpacked_kernels.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

using namespace ::rm::cpu::RM_ISA;

constexpr int kRows = RM_ISA_LEVEL >= 2 ? 12 : 6;
constexpr int64_t kColumns = 2 * kWidth;
// So few rows of b stay in the first-level cache: rows of c are made one tile after another.
constexpr int64_t kShortK = 32;

/// R rows of c, from column n0 on: two whole vectors, or one of `count` elements.
template <int R, bool kWhole>
void tile(const UnpackedArgs& g, int64_t row, int64_t n0, int64_t count) {
  constexpr int kVectors = kWhole ? 2 : 1;
  vf sum[R][kVectors];
  for (int r = 0; r < R; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = vf{};
  }
  const float* a = g.a + row * g.a_row;
  const float* b = g.b + n0;
  for (int64_t k = 0; k < g.k; ++k, a += g.a_col, b += g.b_row) {
    vf x[kVectors];
    if constexpr (kWhole) {
      x[0] = vload(b);
      x[1] = vload(b + kWidth);
    } else {
      x[0] = vload_part(b, count);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf by = vset(a[r * g.a_row]);
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] += by * x[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    float* c = g.c + (row + r) * g.c_row + n0;
    if constexpr (kWhole) {
      vstore(c, sum[r][0] * g.alpha);
      vstore(c + kWidth, sum[r][1] * g.alpha);
    } else {
      vstore_part(c, sum[r][0] * g.alpha, count);
    }
  }
}

template <int R>
void columns(const UnpackedArgs& g, int64_t row, int64_t n0) {
  if (g.n - n0 >= kColumns) return tile<R, true>(g, row, n0, kColumns);
  for (; n0 < g.n; n0 += kWidth) tile<R, false>(g, row, n0, imin(kWidth, g.n - n0));
}

template <int R = kRows>
void rows(const UnpackedArgs& g, int64_t row, int64_t count, int64_t n0) {
  if constexpr (R > 1) {
    if (count < R) return rows<R - 1>(g, row, count, n0);
  }
  columns<R>(g, row, n0);
}

void multiply(const UnpackedArgs& g) {
  const int64_t tiles = (g.m + kRows - 1) / kRows, each = (g.m + tiles - 1) / tiles;
  if (g.k <= kShortK) {
    for (int64_t row = 0; row < g.m; row += each) {
      for (int64_t n0 = 0; n0 < g.n; n0 += kColumns) rows(g, row, imin(each, g.m - row), n0);
    }
    return;
  }
  for (int64_t n0 = 0; n0 < g.n; n0 += kColumns) {
    for (int64_t row = 0; row < g.m; row += each) rows(g, row, imin(each, g.m - row), n0);
  }
}

}  // namespace

extern const UnpackedSet unpacked_kernels;
const UnpackedSet unpacked_kernels = {multiply, kRows, static_cast<int>(kColumns)};

}  // namespace rm::cpu::gemm::RM_ISA
