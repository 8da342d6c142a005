// The step small_steps of docs/operators.md: element-wise programs, reductions, softmax and gather over
// few elements, one after the other in one block, with values in between in shared memory. Other blocks
// take elements of large element-wise parts that need no others.
#pragma once

#include <vector>

#include "ewise/api.hpp"

namespace rm::cuda_ops {

struct SmallSteps {
  std::vector<Tensor> inputs, outputs;
  std::vector<std::int64_t> program;  // src/plan/small_program.hpp
  EwiseProgram code;
};

std::span<const KernelRow<SmallSteps>> small_steps_rows();
/// What a call checks first: a program that stays inside its values, and which tensors share memory.
Status legal(const SmallSteps& p);
Status small_steps(const SmallSteps& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
