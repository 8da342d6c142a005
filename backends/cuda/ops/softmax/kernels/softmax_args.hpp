// What the softmax kernels are launched with: pointers, row pitches (elements) and sizes.
#pragma once

#include <cstdint>

namespace rm::cuda_ops {

struct SoftmaxArgs {
  const void *x, *dy;  // forward: x; backward: x is the forward result y
  void* out;
  std::int64_t rows, x_pitch, dy_pitch, out_pitch;
  int n;
};

}  // namespace rm::cuda_ops
