// Decodes and checks grouped_gemm problems (docs/operators.md, row `grouped_gemm`).
#include "ops/grouped_gemm/problem.hpp"

#include <algorithm>
#include <stdexcept>

namespace rm::cpu::gemm {

int64_t GroupedProblem::offset(const void* offsets, int64_t group) const {
  const int64_t at = group * offset_step;
  return wide_offsets ? static_cast<const int64_t*>(offsets)[at]
                      : static_cast<const int32_t*>(offsets)[at];
}

int64_t GroupedProblem::groups_met() const {
  return std::max<int64_t>(1, std::min(groups, product.m));
}

GemmProblem GroupedProblem::typical() const {
  GemmProblem one = product;
  one.m = (product.m + groups_met() - 1) / groups_met();
  return one;
}

GroupedProblem decode_grouped(const rm_problem& problem) {
  const Problem p(problem);
  const View x = p.input(kX), w = p.input(kWeights), offsets = p.input(kOffsets), y = p.output(0);
  const bool ranks = x.rank() == 2 && w.rank() == 3 && offsets.rank() == 1 && y.rank() == 2;
  if (!ranks || w.dim(1) != x.dim(1) || offsets.dim(0) != w.dim(0) || y.dim(0) != x.dim(0) ||
      y.dim(1) != w.dim(2)) {
    throw std::invalid_argument(
        "[grouped_gemm] expected x [S,K], w [E,K,N], offsets [E] and y [S,N], got other shapes");
  }
  if (offsets.dtype != DType::i64 && offsets.dtype != DType::i32) {
    throw std::invalid_argument("[grouped_gemm] expected offsets of i32 or i64, got another type");
  }
  GroupedProblem g;
  g.product.m = x.dim(0), g.product.k = x.dim(1), g.product.n = w.dim(2);
  g.product.dtype = {x.dtype, w.dtype, DType::invalid, DType::invalid, y.dtype};
  g.product.row = {x.step(0), w.step(1), 0, 0, y.step(0)};
  g.product.col = {x.step(1), w.step(2), 0, 0, y.step(1)};
  g.product.constant_b =
      (problem.constant_inputs >> kWeights & 1) != 0 && p.attr_int("pack_weights", 1) != 0;
  g.groups = w.dim(0);
  g.group_step = w.step(0);
  g.wide_offsets = offsets.dtype == DType::i64;
  g.offset_step = offsets.step(0);
  return g;
}

}  // namespace rm::cpu::gemm
