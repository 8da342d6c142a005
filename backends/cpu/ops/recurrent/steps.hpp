// recurrent on panels of an instruction set: the threads share the rows of the batch, or, where
// those are too few, the panels of every step.
#pragma once

#include <string>

#include "ops/recurrent/problem.hpp"

namespace rm::cpu::recurrent {

class Steps {
 public:
  static const char* reject(const RecurrentProblem& r);
  Steps(const RecurrentProblem& r, const KernelSet& kernels);

  bool packs(size_t operand) const;
  uint64_t packed_bytes(size_t operand) const;
  const std::string& layout(size_t operand) const { return layout_[operand == kW ? 0 : 1]; }
  void prepack(size_t operand, const rm_tensor& source, void* packed) const;
  uint64_t workspace_bytes() const;
  void launch(const rm_launch& l) const;

 private:
  /// One matrix in panels: the gates' weight or the projection.
  struct Matrix {
    int64_t gates = 0, units = 0, depth = 0, panels = 0, panel_bytes = 0;
    int64_t bytes() const { return panels * panel_bytes; }
  };
  struct Run;
  /// What the threads share, and how many there are.
  struct Split {
    int threads = 1;
    bool rows = true;
  };

  Matrix matrix(int64_t gates, int64_t units, int64_t depth) const;
  Split split() const;
  void pack(const Matrix& m, const Strides& s, const void* src, void* dst) const;

  RecurrentProblem r_;
  const KernelSet& k_;
  Matrix w_, proj_;
  int64_t ld_c_ = 0, ld_h_ = 0;  // units and elements of the state, in whole vectors
  std::string layout_[2];
};

}  // namespace rm::cpu::recurrent
