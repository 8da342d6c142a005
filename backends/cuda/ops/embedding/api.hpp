// y[i, :] = table[ids[i], :] and its gradient. An id outside [0, V) reads nothing: its row of y is
// NaN, and it adds to no row of the gradient. Gradient rows are summed in fp32, in the ids' order.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct EmbeddingForward {
  Tensor table, ids, y;  // [V, N], [*] int32 or int64 of at most two strides, [*, N] dense
  /// [1] int32 on the device, set to 1 where an id lies outside the table and left alone otherwise:
  /// a call cannot raise for what only the device sees.
  const Tensor* out_of_range = nullptr;
};
struct EmbeddingBackward {
  Tensor dy, ids, dtable;                // [*, N] dense, [*], [V, N] dense: overwritten
  const Tensor* out_of_range = nullptr;  // as forward's
};

std::span<const KernelRow<EmbeddingForward>> embedding_forward_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const EmbeddingForward& p);
std::span<const KernelRow<EmbeddingBackward>> embedding_backward_rows();
Status embedding_forward(const EmbeddingForward& p, const char* kernel, Stream stream);
std::size_t embedding_backward_workspace(const EmbeddingBackward& p);
Status embedding_backward(const EmbeddingBackward& p, const char* kernel, Workspace workspace,
                          Stream stream);

}  // namespace rm::cuda_ops
