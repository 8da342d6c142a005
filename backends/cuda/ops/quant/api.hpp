// Weights of 8 and 4 bits in groups along K, symmetric, as gemv reads them: q int8 [N, P], or of 4
// bits uint8 [N, P/2] with element 2j in the low and 2j + 1 in the high half of byte j and 8 added;
// P is K rounded up to 64. Scales are [ceil(K/group), N] of the float type: w[n, k] = q * scale.
#pragma once

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

/// q and scales of w [N, K], dense: bit for bit `quantize` of docs/operators.md. Padding is zero.
struct Quantize {
  Tensor w, q, scales;
  int bits = 8, group = 128;  // 8 or 4; 32, 64 or 128
};

/// y [N, K] of the scales' type (their rows may be pitched). Its own rows lie P elements apart, and
/// P elements of each are written, zeros behind the last of K.
struct Dequantize {
  Tensor q, scales, y;
  int bits = 8, group = 128;
};

inline std::int64_t quant_padded(std::int64_t k) { return (k + 63) / 64 * 64; }

std::span<const KernelRow<Quantize>> quantize_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Quantize& p);
Status legal(const Dequantize& p);
Status quantize(const Quantize& p, const char* kernel, Stream stream);
Status dequantize(const Dequantize& p, Stream stream);

}  // namespace rm::cuda_ops
