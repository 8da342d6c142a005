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
  /// Between whatever wrote w, scales and bias and this call the stream has run something that
  /// starts only after all before it has ended: a copy, a graph's launch, an ordinary kernel. A
  /// kernel that overlaps may start, and let this one start, before the writer has ended.
  bool stable_weights = false;
  /// Launch by programmatic dependent launch: w, scales and bias are read while earlier work of the
  /// stream still runs, not only its last kernel. Has an effect only with stable_weights.
  bool overlap = false;
};

/// Up to three weights against the rows of x, which are normalised first where `norm` is given:
/// y[i] = activation(x' w[i]^T + bias[i]), x' = x / rms(x) * (norm + weight_offset), plus the residual
/// where there is one weight. centred: x' = (x - mean(x)) / sqrt(variance(x) + eps) * norm + norm_bias.
/// gated: y[0] = activation(x' w[0]^T) * (x' w[1]^T). turned: one weight, which is [K, N].
/// All weights are of x's dtype, or all of 8 or of 4 bits with scales as in Gemv, of one group.
struct GemvGroup {
  Tensor x;                                            // [M, K]
  const Tensor* norm = nullptr;                        // [K]
  const Tensor* norm_bias = nullptr;                   // [K], where centred
  bool centred = false;                                // norm is a layer norm's weight
  float eps = 1e-5f, weight_offset = 0.0f;
  int count = 1;                                       // of the weights
  Tensor w[3], y[3];                                   // [N, K] or (int4) [N, K/2]; [M, N]
  const Tensor* scales[3] = {};                        // [K/group, N]
  const Tensor* bias[3] = {};                          // [N]
  const Tensor* residual = nullptr;                    // [M, N]
  Activation activation = Activation::none;
  bool gated = false;                                  // two weights, no bias; y[0] alone
  bool turned = false;                                 // one weight of x's dtype, [K, N]
  bool stable_weights = false, overlap = false;        // as in Gemv, the norm's operands too
};

std::span<const KernelRow<GemvGroup>> gemv_group_rows();
Status legal(const GemvGroup& p);
Status gemv_group(const GemvGroup& p, const char* kernel, Stream stream);

std::span<const KernelRow<Gemv>> gemv_rows();
/// What a call checks first: shapes, dtypes, strides, and which tensors share memory.
Status legal(const Gemv& p);
Status gemv(const Gemv& p, const char* kernel, Stream stream);

/// Reads a dense tensor once, as fast as the card can, and does nothing with it: the yardstick.
Status read_probe(const Tensor& data, Stream stream);

}  // namespace rm::cuda_ops
