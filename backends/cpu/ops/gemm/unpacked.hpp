// The unpacked gemm: b is read where it lies, its columns dense. For products of which packing b is
// the larger part: few rows, or a short k, as the gradients of a small batch have them.
//
// Every element of c is one chain of multiply-adds in the order of k.
#pragma once

#include <vector>

#include "ops/gemm/problem.hpp"
#include "ops/gemm/unpacked_kernels.hpp"
#include "rm/kernels.h"

namespace rm::cpu::gemm {

class UnpackedGemm {
 public:
  static constexpr int64_t kMostRows = 64, kLongestK = 64;  // one of both must hold
  static constexpr int64_t kMostOfB = 128 << 10;  // elements: read once a tile of rows, from a near cache
  /// Static string, or null when the problem is supported.
  static const char* reject(const GemmProblem& g);

  /// rm_kernel.edges of a row with these kernels.
  static std::vector<rm_edge> edges(const UnpackedSet& kernels);

  UnpackedGemm(GemmProblem problem, const UnpackedSet& kernels);

  uint64_t workspace_bytes() const { return 0; }
  void launch(const rm_launch& l) const;

 private:
  GemmProblem g_;
  const UnpackedSet& k_;
  int threads_;
};

}  // namespace rm::cpu::gemm
