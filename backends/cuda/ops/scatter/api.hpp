// scatter of docs/operators.md for float32: y is x with src written along one axis where index says,
// or what was there combined with it. What falls on one element is combined in the order of src: the
// same bits each time. An index outside its axis ends the kernel with an error, as in ops/indexing.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

enum class ScatterKind : int { set, add, mul, max, min };

struct Scatter {
  Tensor x, index, src, y;  // index int32 or int64, of src's shape
  int axis = 0;
  ScatterKind kind = ScatterKind::set;
};

std::span<const KernelRow<Scatter>> scatter_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Scatter& p);
Status scatter(const Scatter& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
