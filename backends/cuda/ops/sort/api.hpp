// sort of docs/operators.md: values in order along one axis, and where they came from; all of them or
// the first k. Equal values keep their order (stable); NaN counts as the largest value and both zeros
// are equal, as in torch. Values come out as the bits that went in. Any dtype, any strides.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

/// values and indices have x's shape, but for k <= x's size along the axis; indices are int64.
struct Sort {
  Tensor x, values, indices;
  int axis = 0;
  bool descending = false;
};

std::span<const KernelRow<Sort>> sort_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Sort& p);
/// Bytes with which any row may run.
std::size_t sort_workspace(const Sort& p);
Status sort(const Sort& p, const char* kernel, Workspace workspace, Stream stream);

}  // namespace rm::cuda_ops
