// What the unpacked gemm's ISA source gives.
#pragma once

#include <cstdint>

namespace rm::cpu::gemm {

/// c[m, n] = alpha a b in f32. Steps in elements; b and c have dense rows.
struct UnpackedArgs {
  const float* a;
  int64_t a_row, a_col;
  const float* b;
  int64_t b_row;
  float* c;
  int64_t c_row;
  int64_t m, n, k;
  float alpha;
};

struct UnpackedSet {
  void (*multiply)(const UnpackedArgs&);
  int tile_rows, tile_columns;
};

}  // namespace rm::cpu::gemm
