// Tensor maps of a convolution's operands, for the kernels that the copy engine feeds.
#pragma once

#include "conv2d/common.hpp"
#include "conv2d/kernels/conv2d_args.hpp"

namespace rm::cuda_ops {

struct ConvMapsArgs;

/// Why the copy engine cannot walk the operands of `g`; null: it can.
const char* conv_maps_why_not(const ConvGemmArgs& g, DType dtype);
/// Maps for tiles of `m` places by `n` output channels.
Status encode_conv_maps(const ConvGemmArgs& g, DType dtype, int m, int n, ConvMapsArgs* out);

}  // namespace rm::cuda_ops
