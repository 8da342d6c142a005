// One row of logits, as the ISA sources see it.
#pragma once

#include "common/types.hpp"

namespace rm::cpu {

/// Strides are those of the last axis; scratch holds n of the compute type (f64 for f64 logits, else
/// f32). `target` is within [0, n).
struct LossRow {
  const void* x;
  void *dx, *scratch;
  int64_t n, x_stride, dx_stride, target;
  double loss, lse, dloss;  // forward writes the first two, backward reads the others
};
using LossFn = void (*)(LossRow&);
struct LossTable {
  LossFn (*forward)(DType);  // f32, f64, bf16, f16
  LossFn (*backward)(DType);
};

}  // namespace rm::cpu
