// gemm through oneDNN's matmul, the epilogue as post-operations.
//
// The weight's layout is the library's choice for the shape; layout() spells it out, so equal
// layouts share one packed copy.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "onednn/primitive.hpp"
#include "ops/gemm/problem.hpp"
#include "rm/kernels.h"

namespace rm::cpu::gemm {

class OneDnnGemm {
 public:
  static const char* reject(const GemmProblem& g);

  /// Throws std::runtime_error when the library refuses the problem.
  explicit OneDnnGemm(GemmProblem problem);

  uint64_t workspace_bytes() const { return workspace_bytes_; }
  bool packs(size_t operand) const { return operand == kB && g_.constant_b; }
  const char* layout(size_t) const { return layout_.c_str(); }
  uint64_t packed_bytes(size_t) const { return packed_bytes_; }
  void prepack(size_t operand, const rm_tensor& source, void* packed) const;
  void launch(const rm_launch& l) const;

 private:
  std::vector<int64_t> dims(int64_t rows, int64_t cols, bool shared) const;
  onednn::Description describe(Operand o, int64_t rows, int64_t cols) const;
  onednn::Attributes attributes(int* residual_argument) const;

  GemmProblem g_;
  onednn::Description md_[kOperands];
  std::optional<onednn::Primitive> primitive_;
  uint64_t packed_bytes_ = 0, workspace_bytes_ = 0;
  std::string layout_;
};

}  // namespace rm::cpu::gemm
