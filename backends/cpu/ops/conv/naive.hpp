// The plain loop: any layout, any floating type. The fallback, and the oracle at small sizes.
#pragma once

#include "ops/conv/problem.hpp"

namespace rm::cpu::conv {

class NaiveConv {
 public:
  static const char* reject(const ConvProblem&) { return nullptr; }
  explicit NaiveConv(ConvProblem problem) : c_(std::move(problem)) {}
  void launch(const rm_launch& l) const;

 private:
  ConvProblem c_;
};

}  // namespace rm::cpu::conv
