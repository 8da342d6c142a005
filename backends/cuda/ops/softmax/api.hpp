// softmax and log_softmax over the last axis, and their gradient from the result y.
// Leading axes collapse to rows; any row pitch.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct SoftmaxForward {
  Tensor x, y;
  bool log = false;
};

/// dx = y * (dy - sum(dy * y)); with log: dx = dy - exp(y) * sum(dy).
struct SoftmaxBackward {
  Tensor dy, y, dx;
  bool log = false;
};

std::span<const KernelRow<SoftmaxForward>> softmax_forward_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const SoftmaxForward& p);
std::span<const KernelRow<SoftmaxBackward>> softmax_backward_rows();
Status softmax_forward(const SoftmaxForward& p, const char* kernel, Stream stream);
Status softmax_backward(const SoftmaxBackward& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
