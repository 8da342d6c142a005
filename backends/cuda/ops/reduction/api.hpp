// y = reduction of x over any axes; y has x's rank, reduced axes of size 1. sum, mean, prod, max,
// min accumulate in fp32 (NaN wins in max and min); argmax and argmin give the first index over the
// reduced axes taken in order, as int64. Over nothing: 0, NaN, 1, -inf, +inf; arg* is an error.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

enum class Reduce : int { sum, mean, prod, max, min, argmax, argmin };
inline constexpr const char* kReduceNames[] = {"sum", "mean",   "prod",  "max",
                                               "min", "argmax", "argmin"};

struct Reduction {
  Tensor x, y;
  Reduce kind = Reduce::sum;
};

std::span<const KernelRow<Reduction>> reduction_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Reduction& p);

/// Bytes with which several blocks share an element of y where there are few; less is legal.
std::size_t reduction_workspace(const Reduction& p);
Status reduction(const Reduction& p, const char* kernel, Workspace workspace, Stream stream);

}  // namespace rm::cuda_ops
