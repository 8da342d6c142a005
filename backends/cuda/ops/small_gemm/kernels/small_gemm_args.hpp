// What the kernels of small products are launched with. Strides are in elements.
#pragma once

#include "_shim/epilogue_shim.hpp"
#include "small_gemm/api.hpp"

namespace rm::cuda_ops {

/// How a tile of an operand is read: element by element or in vectors of four, along K or across it.
enum class TileRead : int { along, across, along_vectors, across_vectors };

/// op(a) [M, K] and op(b) [N, K]: element (row, k) lies at row * row_step + k * k_step.
struct TileOperand {
  const float* data;
  std::int64_t row_step, k_step;
  int rows;
  TileRead read;
};

struct SmallProduct {
  TileOperand a, b;
  float *c, *sums;  // sums of op(a) over K, by row; null: not wanted
  std::int64_t c_row;
  int k, first_block, columns;  // tiles of c's columns
};

struct ProductProgram {
  int operands, steps;
  const float* operand[kMostSmallOperands];
  std::int64_t row_step[kMostSmallOperands], column_step[kMostSmallOperands];
  struct {
    std::int16_t opcode, a, b, c;
    float imm;
  } step[kMostSmallInstructions];
};

struct SmallGemmArgs {
  SmallProduct product;
  EpilogueArgs epilogue;
  ProductProgram program;
};

struct SlopesArgs {
  int count;
  SmallProduct product[kMostSlopes];
};

}  // namespace rm::cuda_ops
