// What the direct gemm (direct.cpp) and its per-ISA kernels (isa_direct.cpp) agree on.
//
// Plain data and function pointers only, like tile.hpp.
#pragma once

#include "ops/gemm/tile.hpp"

namespace rm::cpu::gemm {

constexpr int kStreams = 4;

/// acc[s][i * acc_step + j] = x[i] . (row j of stream s), for every stream, j < count and i < m.
///
/// Streams lie far apart: processors fetch ahead within a page, so several pages must be in flight
/// to use all of the memory's bandwidth. Every result is one chain in the order of k whatever m is.
struct DotArgs {
  const float* x;
  int64_t ldx, m;
  const char* w[kStreams];
  int64_t row_bytes, count, k;
  float* acc[kStreams];
  int64_t acc_step;
};

/// Rows of x as the kernels read them, zeros past k: f32 in the order the weights come apart, or the
/// elements themselves where the kernels multiply those.
struct SpreadArgs {
  const void* src;
  int64_t row_stride, col_stride, m, k;
  float* dst;
  int64_t ldx;
};

struct DirectSet {
  int tile_rows;        // most rows of x in a tile
  int tile_columns[2];  // rows of the weight with one row of x, with a full tile
  int block;            // elements of k a step
  int64_t piece;        // elements of k in one pass; longer sums are added up pass by pass
  void (*dot[kTileTypes])(const DotArgs&);
  void (*spread[kTileTypes])(const SpreadArgs&);
};

}  // namespace rm::cpu::gemm
