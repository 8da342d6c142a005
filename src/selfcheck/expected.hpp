// What a launch should give, by the references of src/ops: whole results where they are small,
// else whole rows and whole columns of them.
#pragma once

#include <vector>

#include "ops/host_tensor.hpp"
#include "selfcheck/operands.hpp"

namespace rm::selfcheck {

/// A part of result `output`: values, and which elements (row-major) they are.
struct Part {
  size_t output;
  ops::HostTensor values;
  std::vector<int64_t> elements;
};

/// `before`: the results as they were before the launch, which index_copy updates.
std::vector<Part> expected(const Shape& shape, const std::vector<Filled>& inputs,
                           const std::vector<Filled>& before);

/// Where `got` differs from `want` by more than rounding allows, as elements of the result.
std::vector<int64_t> differences(const Shape& shape, const Part& want, const ops::HostTensor& got);

}  // namespace rm::selfcheck
