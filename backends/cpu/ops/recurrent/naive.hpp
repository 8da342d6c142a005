// recurrent in plain loops, for strides that the panels do not take.
#pragma once

#include "ops/recurrent/problem.hpp"

namespace rm::cpu::recurrent {

class NaiveSteps {
 public:
  static const char* reject(const RecurrentProblem&) { return nullptr; }
  explicit NaiveSteps(const RecurrentProblem& r) : r_(r) {}
  uint64_t workspace_bytes() const;
  void launch(const rm_launch& l) const;

 private:
  RecurrentProblem r_;
};

}  // namespace rm::cpu::recurrent
