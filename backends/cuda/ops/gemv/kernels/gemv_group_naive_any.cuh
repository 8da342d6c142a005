// A group of products, a warp an element, element by element: any K, any address.
#pragma once

#include "_shim/epilogue_shim.cuh"
#include "gemv/kernels/gemv_args.hpp"

namespace rm::cuda_ops {

template <class T>
__global__ void __launch_bounds__(256)
    gemv_group_naive(const T* x, int k, std::int64_t rows, const GemvGroupArgs g) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * 8;
  for (std::int64_t i = blockIdx.x * 8ll + threadIdx.x / 32; i < rows; i += step) {
    const int part = g.gated ? 0 : (i >= g.first[1] ? 1 : 0) + (i >= g.first[2] ? 1 : 0);
    const std::int64_t n = g.gated ? i : i - g.first[part];
    const T* w = static_cast<const T*>(g.w[part]) + n * k;
    const T* second = g.gated ? static_cast<const T*>(g.w[1]) + n * k : nullptr;
    float v = 0.0f, u = 0.0f, squares = 0.0f;
    for (int at = threadIdx.x % 32; at < k; at += 32) {
      float a = to_float(x[at]);
      if (g.norm) {
        squares += a * a;
        a *= to_float(static_cast<const T*>(g.norm)[at]) + g.weight_offset;
      }
      v += a * to_float(w[at]);
      if (second) u += a * to_float(second[at]);
    }
    v = warp_reduce<Sum>(v), u = warp_reduce<Sum>(u), squares = warp_reduce<Sum>(squares);
    if (threadIdx.x % 32 != 0) continue;
    if (g.norm) {
      const float inverse = rsqrtf(squares / static_cast<float>(k) + g.eps);
      v *= inverse, u *= inverse;
    }
    if (g.bias[part]) v += to_float(static_cast<const T*>(g.bias[part])[n]);
    v = activate<sizeof(T) == 2>(g.activation, v, 0.0f);
    if (g.gated) v *= u;
    if (g.residual) v += to_float(static_cast<const T*>(g.residual)[n]);
    static_cast<T*>(g.y[part])[n] = from_float<T>(v);
  }
}

}  // namespace rm::cuda_ops
