// What the wgmma gemm is launched with: up to two products in one launch, each with the tensor maps
// of its operands and results.
#pragma once

#include <cuda.h>

#include "_shim/divide_shim.hpp"
#include "gemm/kernels/gemm_args.hpp"

namespace rm::cuda_ops {

struct WgmmaProblem {
  CUtensorMap a, b, c_map;            // c_map: where c_lines
  int m, n, batch, k_blocks;          // k_blocks: of 64, a block's share of them
  int units_m, units, group;          // a unit: one tile a block of a cluster; group: rows of units
  FastDivisor in_batch, in_group;     // units
  FastDivisor whole_rows, last_rows;  // of a group, of the last one
  int share;                          // blocks below each other that share b's tile
  bool split;                         // the cluster's blocks each take a part of K
  bool trans_a, trans_b;              // the stored matrix is dense along M, N
  bool a_batched, b_batched;
  bool c_lines;    // c leaves by the copy engine: rows on 16 bytes, columns in eights
  bool aux_lines;  // rows lie on 16 bytes
  bool plain;      // the epilogue's short way: see finish_plain
  bool pairs;      // c, residual and aux may be accessed in pairs
  void* c;
  std::int64_t c_pitch, c_batch;
  EpilogueArgs epilogue;
};

struct WgmmaArgs {
  WgmmaProblem problem[2];
  int problems;
  ColumnSums sums;  // of something else, on the way
};

}  // namespace rm::cuda_ops
