// What a convolution fed by tensor maps is launched with.
#pragma once

#include <cuda.h>

#include "conv2d/kernels/conv2d_args.hpp"

namespace rm::cuda_ops {

struct ConvMapsArgs {
  CUtensorMap x, w;  // x: boxes of kM places, w [G * out, KH, KW, padded]: of kN output channels
  ConvGemmArgs g;
  /// of H and W: where the first tap of place 0 reads, and from tap to tap; negative steps run from
  /// the last tap, which then reads first
  int lower[2], step[2];
};

}  // namespace rm::cuda_ops
