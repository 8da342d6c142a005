// layer_norm and rms_norm over the last axis, a residual added first where given, and their
// gradients. Leading axes collapse to rows; x may have any row pitch, weight and bias are dense and
// of x's dtype.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

enum class Norm { layer, rms };

/// h = x + residual; y = norm(h) * (weight + weight_offset) + bias; sum = h where asked for.
struct NormForward {
  Norm kind = Norm::layer;
  Tensor x, y;
  const Tensor* weight = nullptr;    // [N]
  const Tensor* bias = nullptr;      // [N], layer_norm only
  const Tensor* residual = nullptr;  // like x
  const Tensor* sum = nullptr;       // result, like x
  float eps = 1e-5f, weight_offset = 0.0f;
};

/// h is what was normalised (x, or `sum` with a residual). dx is the gradient of x and of the
/// residual.
struct NormBackward {
  Norm kind = Norm::layer;
  Tensor dy, h, dx;
  const Tensor* weight = nullptr;
  const Tensor* dsum = nullptr;     // gradient that arrived at `sum`: added to dx
  const Tensor* dweight = nullptr;  // results, [N]
  const Tensor* dbias = nullptr;
  float eps = 1e-5f, weight_offset = 0.0f;
};

std::span<const KernelRow<NormForward>> norm_forward_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const NormForward& p);
std::span<const KernelRow<NormBackward>> norm_backward_rows();
Status legal(const NormBackward& p);

Status norm_forward(const NormForward& p, const char* kernel, Stream stream);
std::size_t norm_backward_workspace(const NormBackward& p);
Status norm_backward(const NormBackward& p, const char* kernel, Workspace workspace, Stream stream);

}  // namespace rm::cuda_ops
