// kV neighbouring channels of a result a thread. Bound: memory.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/images_shim.hpp"
#include "_shim/launch_shim.hpp"

namespace rm::cuda_ops {

struct ResizeArgs {
  const void* x;
  void* y;
  ImageShape from, to;
  double ratio[3];
  bool linear, align_corners, channels_last;
};

/// The elements that element i of a result is made of, along one axis.
struct ResizePoints {
  int first, second;
  float weight;  // of the second
};
__device__ __forceinline__ ResizePoints resize_points(const ResizeArgs& p, int axis, int i) {
  const int last = static_cast<int>(p.from.size[axis]) - 1;
  const double ratio = p.ratio[axis];
  if (!p.linear) {
    const int at = min(static_cast<int>(static_cast<float>(i) * static_cast<float>(ratio)), last);
    return {at, at, 0.0f};
  }
  const double real = p.align_corners ? ratio * i : fmax(0.0, ratio * (i + 0.5) - 0.5);
  const int first = min(static_cast<int>(real), last);
  return {first, min(first + 1, last), static_cast<float>(fmin(real - first, 1.0))};
}

template <class T, int kV, class I>
__global__ void __launch_bounds__(256) resize_places(const __grid_constant__ ResizeArgs p) {
  overlap_begin();
  const I channels = static_cast<I>(p.to.c / kV);
  const I total = static_cast<I>(p.to.n * p.to.size[0] * p.to.size[1] * p.to.size[2]) * channels;
  const I i = static_cast<I>(blockIdx.x) * 256 + threadIdx.x;
  if (i >= total) return;
  const ImagePlace<I> place = image_place<I>(p.to, i, channels, p.channels_last);
  const T* x = static_cast<const T*>(p.x) + place.n * p.from.stride[0] +
               place.c * kV * p.from.stride[1];
  T* y = static_cast<T*>(p.y) + place.n * p.to.stride[0] + place.c * kV * p.to.stride[1] +
         place.at[0] * p.to.stride[2] + place.at[1] * p.to.stride[3] + place.at[2] * p.to.stride[4];
  ResizePoints points[3];
  for (int a = 0; a < 3; ++a) points[a] = resize_points(p, a, static_cast<int>(place.at[a]));
  const auto offset = [&](int a, bool second) {
    return (second ? points[a].second : points[a].first) * p.from.stride[2 + a];
  };
  if (!p.linear) {
    const T* from = x + offset(0, false) + offset(1, false) + offset(2, false);
    *reinterpret_cast<Pack<T, kV>*>(y) = *reinterpret_cast<const Pack<T, kV>*>(from);
    return;
  }
  float value[kV] = {};
  for (int corner = 0; corner < 8; ++corner) {
    float weight = 1.0f;
    std::int64_t at = 0;
    bool counts = true;
    for (int a = 0; a < 3; ++a) {
      const bool second = (corner >> a & 1) != 0;
      counts = counts && (!second || points[a].second != points[a].first);
      // At the end of an axis both are one element: it has the whole weight.
      const bool one = points[a].second == points[a].first;
      weight *= second ? points[a].weight : one ? 1.0f : 1.0f - points[a].weight;
      at += offset(a, second);
    }
    if (!counts) continue;
    float v[kV];
    load_vec<T, kV>(x + at, v);
#pragma unroll
    for (int j = 0; j < kV; ++j) value[j] += weight * v[j];
  }
  store_vec<T, kV>(y, value);
}

}  // namespace rm::cuda_ops
