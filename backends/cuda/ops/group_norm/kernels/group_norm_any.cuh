// A block a group of a sample, any strides: three passes over its elements. Bound: latency.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/launch_shim.hpp"
#include "group_norm/kernels/group_norm_args.hpp"

namespace rm::cuda_ops {

__device__ __forceinline__ float norm_silu(float x) { return x / (1.0f + __expf(-x)); }

template <class T>
__global__ void __launch_bounds__(512) group_norm_any(const __grid_constant__ GroupNormArgs p) {
  overlap_begin();
  const ImageShape& s = p.from;
  const std::int64_t plane = s.size[0] * s.size[1] * s.size[2], count = plane * p.per_group;
  const std::int64_t all = s.n * p.groups;
  for (std::int64_t group = blockIdx.x; group < all; group += gridDim.x) {
    const std::int64_t n = group / p.groups;
    const int c0 = static_cast<int>(group - n * p.groups) * p.per_group;
    const auto each = [&](auto&& body) {
      for (std::int64_t i = threadIdx.x; i < count; i += blockDim.x) {
        const std::int64_t channel = i / plane;
        std::int64_t rest = i - channel * plane, from = n * s.stride[0], to = n * p.to.stride[0];
        const int c = c0 + static_cast<int>(channel);
        from += c * s.stride[1], to += c * p.to.stride[1];
        for (int a = 2; a >= 0; --a) {
          const std::int64_t outer = rest / s.size[a], at = rest - outer * s.size[a];
          rest = outer, from += at * s.stride[2 + a], to += at * p.to.stride[2 + a];
        }
        body(to_float(static_cast<const T*>(p.x)[from]), to, c);
      }
    };
    float sum = 0.0f;
    each([&](float v, std::int64_t, int) { sum += v; });
    const float mean = block_reduce<Sum>(sum) / static_cast<float>(count);
    float squares = 0.0f;
    each([&](float v, std::int64_t, int) { squares += (v - mean) * (v - mean); });
    const float scale =
        rsqrtf(block_reduce<Sum>(squares) / static_cast<float>(count) + p.eps);
    each([&](float v, std::int64_t to, int c) {
      v = (v - mean) * scale;
      if (p.weight) v *= to_float(static_cast<const T*>(p.weight)[c]);
      if (p.bias) v += to_float(static_cast<const T*>(p.bias)[c]);
      static_cast<T*>(p.y)[to] = from_float<T>(p.silu ? norm_silu(v) : v);
    });
  }
}

}  // namespace rm::cuda_ops
