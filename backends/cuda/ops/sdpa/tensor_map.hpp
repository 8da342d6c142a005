// Tensor maps of Hopper's copy engine for [B, H, S, D] tensors of 16-bit elements.
#pragma once

#include <cuda.h>

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

/// t in boxes of `rows` rows and 64 columns, swizzled by 128 bytes.
Status encode_tiles(const Tensor& t, int rows, CUtensorMap* map);

/// Why the copy engine cannot read t; null: it can.
const char* tiles_why_not(const Tensor& t);

}  // namespace rm::cuda_ops
