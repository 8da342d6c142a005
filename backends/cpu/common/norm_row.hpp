// One row of layer_norm or rms_norm, as the ISA sources see it.
#pragma once

#include "common/types.hpp"

namespace rm::cpu {

/// One row. Strides are those of the last axis; weight and bias are dense and of the compute type
/// (f64 when x is f64, else f32); scratch holds n of that type.
struct NormRow {
  const void *x, *residual, *weight, *bias;
  void *y, *sum, *scratch;
  int64_t n, x_stride, residual_stride, y_stride, sum_stride;
  double eps, weight_offset;
};
using NormFn = void (*)(const NormRow&);
struct NormTable {
  NormFn (*find)(DType);  // f32, f64, bf16, f16
  void (*widen)(DType from, const void* src, int64_t stride, float* dst, int64_t n);
};

}  // namespace rm::cpu
