// Interpolation along the spatial axes: resize of docs/operators.md, as torch's upsample operators
// compute it. Images [N, C, 1 to 3 spatial axes] of floats, any strides.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct Resize {
  Tensor x, y;
  bool linear = false;  // else the nearest element
  bool align_corners = false;
  double ratio[3] = {1, 1, 1};  // elements of x a step of y, last axes last
};

std::span<const KernelRow<Resize>> resize_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Resize& p);
Status resize(const Resize& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
