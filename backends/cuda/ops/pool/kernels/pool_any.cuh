// kV neighbouring channels of a result a thread. Bound: memory; windows that overlap are read from
// the caches.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/images_shim.hpp"
#include "_shim/launch_shim.hpp"

namespace rm::cuda_ops {

struct PoolArgs {
  const void* x;
  void* y;
  ImageShape from, to;
  int kernel[3], stride[3], dilation[3], begin[3];
  bool mean, count_padding, channels_last;
  int divisor;
};

/// I: unsigned, 32 bits where results can be counted in them.
template <class T, int kV, class I>
__global__ void __launch_bounds__(256) pool_windows(const __grid_constant__ PoolArgs p) {
  overlap_begin();
  const I channels = static_cast<I>(p.to.c / kV);
  const I total = static_cast<I>(p.to.n * p.to.size[0] * p.to.size[1] * p.to.size[2]) * channels;
  const I i = static_cast<I>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= total) return;
  const ImagePlace<I> place = image_place<I>(p.to, i, channels, p.channels_last);
  const T* x = static_cast<const T*>(p.x) + place.n * p.from.stride[0] +
               place.c * kV * p.from.stride[1];
  int first[3], count = 1, inside[3], padded = 1;
  for (int a = 0; a < 3; ++a) {
    first[a] = static_cast<int>(place.at[a]) * p.stride[a] - p.begin[a];
    inside[a] = 0;
    int counted = 0;
    for (int k = 0; k < p.kernel[a]; ++k) {
      const int at = first[a] + k * p.dilation[a];
      inside[a] += at >= 0 && at < p.from.size[a];
      counted += at < p.from.size[a] + p.begin[a];  // torch pads both ends alike
    }
    count *= inside[a], padded *= counted;
  }
  float value[kV];
#pragma unroll
  for (int j = 0; j < kV; ++j) value[j] = p.mean ? 0.0f : Max::kIdentity;
  for (int k0 = 0; k0 < p.kernel[0]; ++k0) {
    const int d = first[0] + k0 * p.dilation[0];
    if (d < 0 || d >= p.from.size[0]) continue;
    for (int k1 = 0; k1 < p.kernel[1]; ++k1) {
      const int h = first[1] + k1 * p.dilation[1];
      if (h < 0 || h >= p.from.size[1]) continue;
      const T* line = x + d * p.from.stride[2] + h * p.from.stride[3];
#pragma unroll 3
      for (int k2 = 0; k2 < p.kernel[2]; ++k2) {
        const int w = first[2] + k2 * p.dilation[2];
        if (w < 0 || w >= p.from.size[2]) continue;
        float v[kV];
        load_vec<T, kV>(line + w * p.from.stride[4], v);
#pragma unroll
        for (int j = 0; j < kV; ++j) value[j] = p.mean ? value[j] + v[j] : Max{}(value[j], v[j]);
      }
    }
  }
  if (p.mean) {
    const int by = p.divisor != 0 ? p.divisor : p.count_padding ? padded : count;
#pragma unroll
    for (int j = 0; j < kV; ++j) value[j] /= static_cast<float>(by);
  }
  T* y = static_cast<T*>(p.y) + place.n * p.to.stride[0] + place.c * kV * p.to.stride[1] +
         place.at[0] * p.to.stride[2] + place.at[1] * p.to.stride[3] + place.at[2] * p.to.stride[4];
  store_vec<T, kV>(y, value);
}

}  // namespace rm::cuda_ops
