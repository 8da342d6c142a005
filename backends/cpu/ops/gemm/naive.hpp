// The fallback gemm: any element types, any strides; a plain loop over k for each element of c.
#pragma once

#include "ops/gemm/problem.hpp"
#include "rm/kernels.h"

namespace rm::cpu::gemm {

class NaiveGemm {
 public:
  explicit NaiveGemm(GemmProblem problem);
  uint64_t workspace_bytes() const;
  void launch(const rm_launch& l) const;

 private:
  GemmProblem g_;
  int threads_;
};

}  // namespace rm::cpu::gemm
