// y = epilogue(x * w), the two-dimensional cross-correlation of torch.nn.functional.conv2d, and its
// gradients. x [N, C, H, W], w [O, C / groups, KH, KW], y [N, O, OH, OW], any strides:
// channels-last tensors are such with stride 1 along C. OH = (H + 2 padding - dilation (KH - 1) -
// 1) / stride + 1. Sums in fp32 (tf32: products of operands rounded to 10 bits of mantissa), one
// rounding.
#pragma once

#include "_shim/epilogue_shim.hpp"

namespace rm::cuda_ops {

struct ConvShape {
  int stride[2] = {1, 1}, padding[2] = {0, 0}, dilation[2] = {1, 1};
  int padding_end[2] = {-1, -1};  // behind the image; -1: as `padding`
  int groups = 1;
  bool tf32 = false;  // float32 only
};

struct Conv2d {
  Tensor x, w, y;
  ConvShape shape;
  /// bias [O] (bias_kind column) or none; residual and aux of y's strides; scale 1.
  Epilogue epilogue;
  bool residual_first = false;  // y = activation(product + bias + residual)
  bool hardswish = false;       // t clamp(t + 3, 0, 6) / 6 in place of the epilogue's activation
  /// Each element of x times w is added to y where forward would have read it (what dx does): w is
  /// [C, O / groups, KH, KW], and any size of y is legal.
  bool transposed = false;
};

/// From dy: dx, dw, dbias where given. Of `epilogue` the activation, its slope, and aux (what
/// forward stored, of dy's strides), which an activation needs. The residual's gradient is dy.
struct Conv2dBackward {
  Tensor dy, x, w;
  ConvShape shape;
  Epilogue epilogue;
  const Tensor* dx = nullptr;
  const Tensor* dw = nullptr;
  const Tensor* dbias = nullptr;
};

std::span<const KernelRow<Conv2d>> conv2d_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Conv2d& p);
/// The rows of dx and dw; `kernel` of conv2d_backward names one for both.
std::span<const KernelRow<Conv2dBackward>> conv2d_backward_rows();

/// Bytes that the row takes which would be chosen.
std::size_t conv2d_workspace(const Conv2d& p, const char* kernel);
Status conv2d(const Conv2d& p, const char* kernel, Workspace workspace, Stream stream);

/// Bytes that the rows take which dx and dw as given would be made by.
std::size_t conv2d_backward_workspace(const Conv2dBackward& p, const char* kernel);
/// Bytes that are enough however dx and dw (where not null) will be laid out.
std::size_t conv2d_backward_most_workspace(const Conv2dBackward& p, const char* kernel);
Status conv2d_backward(const Conv2dBackward& p, const char* kernel, Workspace workspace,
                       Stream stream);

}  // namespace rm::cuda_ops
