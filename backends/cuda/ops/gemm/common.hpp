// A gemm problem as plain sizes and strides, shared by the rows of its table.
#pragma once

#include "_shim/dispatch_shim.hpp"
#include "gemm/api.hpp"
#include "gemm/kernels/gemm_args.hpp"

namespace rm::cuda_ops {

/// Leading axes become rows where b has none and the strides allow it.
struct GemmShape {
  std::int64_t m = 0, n = 0, k = 0, batch = 1;
  Matrix a, b, c;  // as stored
  Epilogue epilogue;
};

GemmShape gemm_shape(const Gemm& p);
GemmArgs gemm_args(const Gemm& p, const GemmShape& s);

/// The library's epilogue for the problem's, or 0 where it has none.
std::int32_t library_epilogue(const Gemm& p);

const char* library_why_not(const Gemm& p);
const char* library_ewise_why_not(const Gemm& p);
Status launch_library(const Gemm& p, Workspace workspace, Stream stream);
Status launch_library_ewise(const Gemm& p, Workspace workspace, Stream stream);
Status launch_epilogue(const Gemm& p, Stream stream);

/// What a measured choice depends on, and whether c is no operand, so that launches may be timed.
std::string choice_key(const Gemm& p, std::size_t workspace_bytes);
bool may_repeat(const Gemm& p);

/// Two products, neither of which needs the other's result, and sums where there are columns.
Status gemm_pair(const Gemm& first, const Gemm& second, const ColumnSums& sums, const char* kernel,
                 Workspace workspace, Stream stream);
Status launch_column_sums(DType dtype, const ColumnSums& sums, Stream stream);

inline constexpr std::size_t kLibraryWorkspace = 32u << 20;  // what cuBLAS asks for on Hopper

}  // namespace rm::cuda_ops
