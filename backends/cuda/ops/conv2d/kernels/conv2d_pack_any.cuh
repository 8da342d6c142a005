// Any strides to [N, H, W, G, padded], channels last and whole vectors, through 32 x 32 tiles of
// places by channels. Bound: memory.
#pragma once

#include "_shim/epilogue_shim.cuh"
#include "conv2d/kernels/conv2d_args.hpp"

namespace rm::cuda_ops {

/// Blocks of 32 x 8 threads: x over tiles of rows (image of the inner axis, place), y over tiles of
/// a group's channels, z over outer * groups + g (from `first`).
template <class T>
__global__ void __launch_bounds__(256)
    conv2d_pack(const __grid_constant__ ConvPackArgs p, int first, bool along_channels) {
  __shared__ T tile[32][33];
  const int image = first + blockIdx.z, g = image % p.groups, outer = image / p.groups;
  const int places = p.h * p.wd, rows = p.inner * places, row0 = blockIdx.x * 32,
            c0 = blockIdx.y * 32;
  const std::int64_t base = outer * p.outer_stride + g * p.group_stride;
  for (int r = threadIdx.y; r < 32; r += 8) {
    const int row = row0 + (along_channels ? r : threadIdx.x);
    const int c = c0 + (along_channels ? threadIdx.x : r);
    float v = 0.0f;
    if (row < rows && c < p.in) {
      const int inner = row / places, place = row - inner * places, line = place / p.wd;
      const std::int64_t at = base + inner * p.stride[0] + c * p.stride[1] + line * p.stride[2] +
                              (place - line * p.wd) * p.stride[3];
      v = to_float(static_cast<const T*>(p.src)[at]);
      if (p.aux) {
        v *= activate_slope<sizeof(T) == 2>(p.activation,
                                            to_float(static_cast<const T*>(p.aux)[at]), p.slope);
      }
    }
    tile[row - row0][c - c0] = from_float<T>(v);
  }
  __syncthreads();
  for (int r = threadIdx.y; r < 32; r += 8) {
    const int row = row0 + r, c = c0 + threadIdx.x;
    if (row >= rows || c >= p.padded) continue;
    const std::int64_t at = (static_cast<std::int64_t>(outer) * rows + row) * p.groups + g;
    static_cast<T*>(p.dst)[at * p.padded + c] = tile[r][threadIdx.x];
  }
}

}  // namespace rm::cuda_ops
