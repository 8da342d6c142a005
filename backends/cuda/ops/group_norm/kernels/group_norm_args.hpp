// What the kernels of group_norm get.
#pragma once

#include "_shim/images_shim.hpp"

namespace rm::cuda_ops {

struct GroupNormArgs {
  const void *x, *weight, *bias;
  void* y;
  float eps;
  int groups, per_group;  // channels of a group
  bool silu;
  ImageShape from, to;  // of the row for any strides
  /// Of channels that lie last: places of a sample that follow each other, and where samples begin.
  int channels, places;
  std::int64_t x_place, x_sample, y_place, y_sample;
  /// [n][chunks][groups][2]: mean and sum of squared distances from it, of a chunk of places.
  float* parts;
  int chunks, places_a_chunk;
};

}  // namespace rm::cuda_ops
