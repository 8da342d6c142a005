// Each group of neighbouring channels of a sample gets mean 0 and variance 1: group_norm of
// docs/operators.md. x, y [N, C, *] of floats, any strides; weight and bias [C] dense, of x's dtype.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct GroupNorm {
  Tensor x, y;
  const Tensor* weight = nullptr;
  const Tensor* bias = nullptr;
  int groups = 1;
  float eps = 1e-5f;
  bool silu = false;  // of the result
};

std::span<const KernelRow<GroupNorm>> group_norm_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const GroupNorm& p);
/// Bytes with which any row may run.
std::size_t group_norm_workspace(const GroupNorm& p);
Status group_norm(const GroupNorm& p, const char* kernel, Workspace workspace, Stream stream);

}  // namespace rm::cuda_ops
