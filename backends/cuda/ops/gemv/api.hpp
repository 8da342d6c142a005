// y [M, N] = epilogue(x [M, K] w^T) for few rows M (decoding): bounded by reading w once.
// w is [N, K] of x's dtype, or int8 [N, K], or int4 as uint8 [N, K/2] (low nibble first, stored
// with 8 added); quantised weights have scales [K/group, N] of x's dtype: w[n, k] = q * scales.
#pragma once

#include "_shim/epilogue_shim.hpp"

namespace rm::cuda_ops {

struct Gemv {
  Tensor x, w, y;
  const Tensor* scales = nullptr;
  Epilogue epilogue;
  /// Launch by programmatic dependent launch: reading w, scales and bias may begin while the
  /// stream's previous kernel still runs, so that kernel must not write them.
  bool overlap = false;
};

std::span<const KernelRow<Gemv>> gemv_rows();
Status gemv(const Gemv& p, const char* kernel, Stream stream);

/// Reads a dense tensor once, as fast as the card can, and does nothing with it: the yardstick.
Status read_probe(const Tensor& data, Stream stream);

}  // namespace rm::cuda_ops
