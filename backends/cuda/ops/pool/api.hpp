// The largest or the mean of each window of an image: pool of docs/operators.md. Images [N, C, 1 to
// 3 spatial axes] of floats, any strides; window p of an axis begins at p * stride - begin. NaN wins
// in max; a window all in the padding gives -inf, or 0 over its count.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct Pool {
  Tensor x, y;  // y's sizes say how many windows there are
  bool mean = false;
  int kernel[3] = {1, 1, 1}, stride[3] = {1, 1, 1}, dilation[3] = {1, 1, 1};  // last axes last
  int begin[3] = {0, 0, 0};
  bool count_padding = true;  // of mean: elements before and behind the image, up to `begin` of them
  int divisor = 0;            // of mean, in place of the count
};

std::span<const KernelRow<Pool>> pool_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Pool& p);
Status pool(const Pool& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
