// scatter of docs/operators.md: y is x with src written along one axis where index says (any dtype), or
// what was there combined with it (floats, int64, int32). What falls on one element is combined in a
// fixed order, the same bits each time; of what is written there the last of src stays. An index
// outside its axis ends the kernel with an error, as in ops/indexing.
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
/// Bytes with which any row may run.
std::size_t scatter_workspace(const Scatter& p);
Status scatter(const Scatter& p, const char* kernel, Workspace workspace, Stream stream);

}  // namespace rm::cuda_ops
