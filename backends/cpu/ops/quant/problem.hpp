// A quant_linear or quantize problem decoded (docs/operators.md).
#pragma once

#include "ops/gemm/problem.hpp"

namespace rm::cpu::quant {

enum Input { kX = 0, kQ, kScale, kZero, kBiasIn, kResidualIn };

struct QuantProblem {
  gemm::GemmProblem gemm;  // x as a, one b of f32 that lies nowhere, bias, residual, c
  int64_t bits = 8, group = 32;
  int64_t row_bytes = 0, scale_row = 0, zero_row = 0;  // strides of rows: bytes, elements, elements
  bool has_zero = false;
  int64_t tile = 1, x_bits = 16;  // rows that lie as one; what few rows of x are rounded to

  int64_t groups() const { return (gemm.k + group - 1) / group; }
  /// Blocks of 32 elements, an even number of them.
  int64_t blocks() const { return (gemm.k + 63) / 64 * 2; }
};

/// Throws std::invalid_argument when the operands do not match docs/operators.md.
QuantProblem decode_linear(const rm_problem& problem);

/// bits, group and tile, checked.
void read_grouping(const Problem& p, int64_t* bits, int64_t* group, int64_t* tile);

}  // namespace rm::cpu::quant
