// y = x cos + rotate(x) sin over [B, H, S, D] with a dense last axis; cos and sin broadcast by stride
// 0 and are of x's dtype or float32. rotate: halves [-x2, x1], or neighbouring pairs (interleaved).
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct Rope {
  Tensor x, cos, sin, y;  // y may be x
  bool interleaved = false;
  bool backward = false;  // the gradient: x is dy, y is dx
};

std::span<const KernelRow<Rope>> rope_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Rope& p);
Status rope(const Rope& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
