// A gemm problem decoded and normalised: leading axes folded into rows where the strides allow it.
#pragma once

#include <array>
#include <vector>

#include "common/problem.hpp"
#include "ops/gemm/tile.hpp"

namespace rm::cpu::gemm {

enum Operand { kA = 0, kB = 1, kBias = 2, kResidual = 3, kC = 4, kOperands = 5 };

struct GemmProblem {
  int64_t m = 0, n = 0, k = 0;
  /// Axes that do not fold into rows, outermost first, and every operand's step along them (0 for
  /// the bias, and for a b that all share).
  std::vector<int64_t> outer;
  std::array<std::vector<int64_t>, kOperands> outer_stride;
  int64_t batch = 1;        // product of outer
  bool shared_b = true;     // b has no outer axes of its own
  bool constant_b = false;  // b never changes and may be kept packed
  bool constant_operand_b = false;  // b never changes

  std::array<DType, kOperands> dtype{};  // DType::invalid: absent
  /// Element strides: a (m, k), b (k, n), bias (0, n), residual and c (m, n).
  std::array<int64_t, kOperands> row{}, col{};
  Activation activation = kNone;
  double alpha = 1.0;

  bool has(Operand o) const { return dtype[o] != DType::invalid; }
  /// Elements from the first element of an operand to that of batch number `index`.
  int64_t offset(Operand o, int64_t index) const;
  bool empty() const { return m == 0 || n == 0 || batch == 0; }
  double flops() const { return 2.0 * double(batch) * double(m) * double(n) * double(k); }
};

/// Where a launch finds the operands: null for those that are not there.
struct Pointers {
  const char* ptr[kOperands] = {};

  Pointers(const GemmProblem& g, const rm_launch& l);
};

/// Throws std::invalid_argument when the operands do not match docs/operators.md.
GemmProblem decode(const rm_problem& problem);

}  // namespace rm::cpu::gemm
