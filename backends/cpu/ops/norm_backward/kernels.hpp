// One row of a norm's gradient, as the ISA sources see it.
#pragma once

#include "common/types.hpp"

namespace rm::cpu {

/// Strides are those of the last axis. weight, dweight and dbias are dense and of the compute type
/// (f64 when h is f64, else f32); the row is added to the latter two. scratch holds 4 n of that type.
struct NormBackwardRow {
  const void *dy, *h, *sum, *weight;  // weight, sum: nullptr without
  void *dx, *dweight, *dbias, *scratch;
  int64_t n, dy_stride, h_stride, sum_stride, dx_stride;
  double eps, weight_offset;
  bool centred;
};
using NormBackwardFn = void (*)(const NormBackwardRow&);
struct NormBackwardTable {
  NormBackwardFn (*find)(DType);  // f32, f64, bf16, f16
};

}  // namespace rm::cpu
