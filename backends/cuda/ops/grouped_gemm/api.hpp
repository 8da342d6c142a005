// grouped_gemm of docs/operators.md: rows of x in groups, each group times a matrix of its own; where the
// groups end lies on the device. Rows behind the last group are zeros. Offsets that fall, are negative
// or lie behind the rows end the kernel with an error, as an index outside does in ops/indexing.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

/// x [S, K], w [E, K, N] and y [S, N] of one float dtype, offsets int32 or int64 [E]; any strides.
struct GroupedGemm {
  Tensor x, w, offsets, y;
};

std::span<const KernelRow<GroupedGemm>> grouped_gemm_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const GroupedGemm& p);
Status grouped_gemm(const GroupedGemm& p, const char* kernel, Stream stream);

}  // namespace rm::cuda_ops
