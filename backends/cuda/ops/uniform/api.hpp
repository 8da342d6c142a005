// The operator uniform of docs/operators.md: Philox4x32-10 of a state that lies on the device, so a
// graph may be launched again with another. The numbers are the CPU's, bit for bit.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct Uniform {
  Tensor state;  // int64 [2]: seed, counter
  Tensor y;      // float32 or float64, dense
};

std::span<const KernelRow<Uniform>> uniform_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Uniform& p);
Status uniform(const Uniform& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
