// What masks and ids are counted with: reductions of integers and bool over any axes, any and all of
// every type, and sums along an axis (cumsum of docs/operators.md). Any strides.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

enum class Count : int { sum, prod, max, min, argmax, argmin, any, all };
inline constexpr const char* kCountNames[] = {"sum",    "prod",   "max", "min",
                                              "argmax", "argmin", "any", "all"};

/// y has x's rank, reduced axes of size 1; int64 for sum and prod (modulo 2^64), argmax and argmin
/// (the first), bool for any and all, else x's dtype. Floats have any and all alone.
struct Counting {
  Tensor x, y;
  Count kind = Count::sum;
};

/// y[i] = x[0] + ... + x[i] along `axis`: floats of x's dtype (f64 in double, the others in fp32,
/// rounded once an element), integers and bool as int64.
struct Cumsum {
  Tensor x, y;
  int axis = 0;
};

std::span<const KernelRow<Counting>> counting_rows();
std::span<const KernelRow<Cumsum>> cumsum_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Counting& p);
Status legal(const Cumsum& p);
Status counting(const Counting& p, const char* kernel, Stream stream);
Status cumsum(const Cumsum& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
