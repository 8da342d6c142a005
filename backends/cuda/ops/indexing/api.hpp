// Elements moved by indices: gather, index, index_copy of docs/operators.md. Any dtype, any strides.
// An index outside its axis ends the kernel with an error, which ends the context, as in PyTorch: a
// call cannot raise for what only the device sees, and no other answer would be right.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

inline constexpr int kMostIndices = 4;

enum class IndexKind : int {
  gather,  // y[i, j, k] = x[i, index[i, j, k], k]
  select,  // y[.., I, ..] = x[.., index0[I], index1[I], ..] along neighbouring axes, -1 is the last
  copy     // y[.., index[j], ..] = x[.., j, ..]; the rest of y stays
};

struct Indexed {
  IndexKind kind = IndexKind::gather;
  Tensor x, y;
  Tensor index[kMostIndices];  // int32 or int64; of one shape
  int indices = 1;
  int axis = 0;  // the first one indexed
};

std::span<const KernelRow<Indexed>> indexed_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Indexed& p);
Status indexed(const Indexed& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
