// The direct gemm: few rows of a, the weight read where and as it lies, once.
//
// For decoding, where reading weights is the bound: no packed copy exists. Results do not depend on
// the number of rows or threads.
#pragma once

#include <vector>

#include "ops/gemm/direct_kernels.hpp"
#include "ops/gemm/problem.hpp"
#include "rm/kernels.h"

namespace rm::cpu::gemm {

class DirectGemm {
 public:
  static constexpr int64_t kMostRows = 32;
  /// Static string, or null when the problem is supported.
  static const char* reject(const GemmProblem& g);

  /// rm_kernel.edges of a row with these kernels.
  static std::vector<rm_edge> edges(const DirectSet& kernels, const KernelSet& stores);

  DirectGemm(GemmProblem problem, const DirectSet& kernels, const KernelSet& stores);

  uint64_t workspace_bytes() const { return thread_bytes_ * static_cast<uint64_t>(threads_); }
  void launch(const rm_launch& l) const;

 private:
  using Operands = Pointers;

  void run(const Operands& o, int64_t chunk0, int64_t chunk1, char* scratch) const;
  /// Columns [n, n + cols) of c from acc[m][nr].
  void store(const Operands& o, const float* acc, int64_t n, int64_t cols) const;

  GemmProblem g_;
  const DirectSet& k_;
  const KernelSet& stores_;
  TileType type_;
  int64_t element_bytes_, chunks_, ldx_;
  int threads_;
  uint64_t thread_bytes_;
};

}  // namespace rm::cpu::gemm
