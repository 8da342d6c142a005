// What the loop nest (driver.cpp) and the per-ISA kernels (isa_kernels.cpp) agree on.
//
// Plain data and function pointers only: this header is compiled under several -m flags, so it must
// not define anything the linker could share between them.
#pragma once

#include <cstdint>

namespace rm::cpu::gemm {

enum TileType : int { kF32 = 0, kBF16 = 1, kF16 = 2, kTileTypes = 3 };

enum Activation : int { kNone = 0, kRelu, kGelu, kGeluTanh, kSilu, kTanh, kSigmoid, kActivations };

/// acc[panel][row][nr] (+)= a[row][k] * b[panel][k][nr] for `steps` steps of k (a step is
/// KernelSet::step values of k). Every element is one chain of fused multiply-adds in the order of
/// k, whatever the tile it falls in: results do not depend on M, on the blocking or on the number
/// of threads.
struct TileArgs {
  const void* a;
  int64_t lda;  // elements
  const void* b;
  int64_t b_panel_bytes;
  int64_t steps;
  float* acc;
  int64_t acc_panel;  // floats
  bool accumulate;    // false: acc starts from zero
  // Prefetched on the side, `ahead_step` bytes a step of k.
  const char* ahead;
  int64_t ahead_step;
};
using TileFn = void (*)(const TileArgs&);

/// c = act(alpha * acc + bias) + residual, for one panel.
struct StoreArgs {
  const float* acc;  // [rows][nr]
  int64_t rows, cols;
  float alpha;
  const void* bias;      // null: none
  const void* residual;  // null: none
  int64_t residual_stride;
  void* c;
  int64_t c_stride;
};
using StoreFn = void (*)(const StoreArgs&);

/// Panels of b: [panel][k / step][nr][step], zero where n or k runs out; element (k, n) lies at k *
/// ks + n * ns. `dst` receives panel_begin first.
struct PackArgs {
  const void* src;
  int64_t ks, ns, k, n;
  void* dst;
  int64_t panel_begin, panel_end;
};

/// Rows of a as the tiles read them: contiguous, in the tile's type, zero past an incomplete step.
struct WidenArgs {
  const void* src;
  int64_t row_stride, col_stride, rows, cols;
  void* dst;
  int64_t dst_stride;
};

/// Rows of a transposed a as column tiles read them: [tile][k][width], width >= KernelSet::mr. Tile t of
/// `tiles` begins with row rows * t / tiles; what lies behind a tile's rows is anything.
struct ColumnsArgs {
  const void* src;  // element (row, k) lies at row + k * col_stride
  int64_t col_stride, rows, tiles, cols;
  bool last;  // nothing may be read behind the rows of the last column
  float* dst;
  int64_t tile_stride;  // floats
};

constexpr int kMaxTileRows = 14;

/// The kernels of one instruction set.
struct KernelSet {
  int mr, nr;
  int block_bytes;      // of a panel, read once for every tile of a block of rows
  int sums_bytes;       // of partial sums that wait for the next block: second-level cache
  int step;             // values of k a step
  int a_element_bytes;  // of a as the tiles read it: 4 (f32) or 2 (bf16)
  const char* layout[kTileTypes];
  int panel_element_bytes[kTileTypes];
  /// tile[type of the panels][rows - 1][0: one panel, 1: wide[rows - 1] panels at once]
  TileFn tile[kTileTypes][kMaxTileRows][2];
  int wide[kMaxTileRows];
  /// a as ColumnsArgs lays it out, lda the width; null where the set has none.
  TileFn column_tile[kTileTypes][kMaxTileRows];
  int column_width;
  StoreFn store[kTileTypes][kActivations];
  void (*pack[kTileTypes])(const PackArgs&);
  void (*widen[kTileTypes])(const WidenArgs&);
  void (*columns[kTileTypes])(const ColumnsArgs&);
};

}  // namespace rm::cpu::gemm
