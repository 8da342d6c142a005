// What the norm kernels are launched with: pointers, row pitches (elements) and sizes.
#pragma once

#include <cstdint>

namespace rm::cuda_ops {

struct NormForwardArgs {
  const void *x, *residual, *weight, *bias;
  void *y, *sum;
  std::int64_t rows, x_pitch, residual_pitch, y_pitch, sum_pitch;
  int n;
  float eps, weight_offset;
};

struct NormBackwardArgs {
  const void *dy, *h, *weight, *dsum;
  void *dx, *dweight, *dbias;
  float* partial;  // vector: [blocks, 2, n]; naive: [rows, 2] of mean and reciprocal deviation
  std::int64_t rows, dy_pitch, h_pitch, dx_pitch, dsum_pitch;
  int n;
  float eps, weight_offset;
};

}  // namespace rm::cuda_ops
