// y = x: same shape and dtype, any strides on both sides. Slices, permutations and parts of a
// concatenation are views, so this one operator moves them all.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

struct Copy {
  Tensor x, y;
};

std::span<const KernelRow<Copy>> copy_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Copy& p);
Status copy(const Copy& p, const char* kernel, Stream stream);
/// Copies that do not depend on each other, in few launches: the parts of a concatenation.
Status copy_parts(std::span<const Copy> parts, const char* kernel, Stream stream);

/// Whether so many bytes of the host can travel as a launch's arguments.
bool writes(std::size_t bytes);
/// Brings them to `to`, ordered with the stream; `from` may change when this returns. cudaMemcpyAsync
/// waits for all work of the stream before it reads memory that is not pinned.
Status write(void* to, const void* from, std::size_t bytes, Stream stream);

}  // namespace rm::cuda_ops
