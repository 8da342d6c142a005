// Cross entropy of logits [R, V] against class ids [R]: one loss and one log-sum-exp a row, fp32.
// The vocabulary is taken in chunks, online: nothing of size [R, V] is ever made. A row whose
// target is ignore_index has loss 0 and gradient 0; any other target outside [0, V) gives NaN.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct CrossEntropyForward {
  Tensor logits;  // [R, V] float, any row pitch
  Tensor target;  // [R] i64, dense
  Tensor loss;    // [R] f32, result
  Tensor lse;     // [R] f32, result: what backward needs
  std::int64_t ignore_index = -100;
};

/// dlogits = (softmax(logits) - onehot(target)) * dloss; dlogits may be the memory of logits.
struct CrossEntropyBackward {
  Tensor logits, target, lse;
  Tensor dloss;  // [R] f32
  Tensor dlogits;
  std::int64_t ignore_index = -100;
};

std::span<const KernelRow<CrossEntropyForward>> cross_entropy_forward_rows();
std::span<const KernelRow<CrossEntropyBackward>> cross_entropy_backward_rows();
Status legal(const CrossEntropyForward& p);
Status legal(const CrossEntropyBackward& p);
std::size_t cross_entropy_workspace(const CrossEntropyForward& p);
Status cross_entropy_forward(const CrossEntropyForward& p, const char* kernel, Workspace workspace,
                             Stream stream);
Status cross_entropy_backward(const CrossEntropyBackward& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
