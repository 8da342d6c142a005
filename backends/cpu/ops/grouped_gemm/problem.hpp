// A grouped_gemm problem decoded: a product of all rows with one of the matrices, and where the others
// lie. How many rows a group has is known at a launch only.
#pragma once

#include <cstdint>

#include "ops/gemm/problem.hpp"
#include "rm/kernels.h"

namespace rm::cpu::gemm {

enum GroupedOperand { kX = 0, kWeights = 1, kOffsets = 2 };

struct GroupedProblem {
  GemmProblem product;     // of all rows with the first matrix; without leading axes
  int64_t groups = 0;      // matrices
  int64_t group_step = 0;  // elements from one matrix to the next
  bool wide_offsets = false;  // i64, else i32
  int64_t offset_step = 0;    // elements

  int64_t offset(const void* offsets, int64_t group) const;
  /// A product of the largest number of rows that a group has where rows are spread evenly.
  GemmProblem typical() const;
  /// Groups that have rows then.
  int64_t groups_met() const;
};

/// Throws std::invalid_argument when the operands do not match docs/operators.md.
GroupedProblem decode_grouped(const rm_problem& problem);

}  // namespace rm::cpu::gemm
