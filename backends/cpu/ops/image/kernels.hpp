// What an instruction set brings for images: arithmetic on n channels of one place.
#pragma once

#include "common/types.hpp"

namespace rm::cpu {

struct ImageKernels {
  /// acc += x
  void (*add)(float* acc, const float* x, int64_t n);
  /// acc = the larger of acc and x; NaN wins.
  void (*largest)(float* acc, const float* x, int64_t n);
  /// acc += w * x
  void (*add_product)(float* acc, const float* x, float w, int64_t n);
  /// acc *= factor
  void (*scale)(float* acc, float factor, int64_t n);
  /// sum += x - origin, squares += (x - origin)^2
  void (*moments)(float* sum, float* squares, const float* x, const float* origin, int64_t n);
  /// y = x * factor + shift, then y * sigmoid(y) where `silu`. y may be x.
  void (*affine)(float* y, const float* x, const float* factor, const float* shift, bool silu,
                 int64_t n);
  /// Element type to f32 and back; strides in elements.
  void (*widen)(DType type, const void* x, int64_t stride, float* y, int64_t n);
  void (*narrow)(DType type, const float* x, void* y, int64_t stride, int64_t n);
};

}  // namespace rm::cpu
