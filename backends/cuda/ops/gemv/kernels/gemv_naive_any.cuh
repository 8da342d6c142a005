// One warp an element of y, element by element: any K, any pitch, any group.
#pragma once

#include "_shim/epilogue_shim.cuh"
#include "gemv/kernels/gemv_args.hpp"

namespace rm::cuda_ops {

/// Of a row of w, and of its scales, which lie `pitch` apart.
template <class T>
__device__ __forceinline__ float gemv_weight(const GemvArgs& p, const char* row, const T* scales,
                                             std::int64_t pitch, std::int64_t k) {
  if (p.bits == 0) return to_float(reinterpret_cast<const T*>(row)[k]);
  const float q =
      p.bits == 8
          ? static_cast<float>(reinterpret_cast<const std::int8_t*>(row)[k])
          : static_cast<float>((static_cast<std::uint8_t>(row[k / 2]) >> (k % 2 * 4) & 15) - 8);
  return q * to_float(scales[k / p.group * pitch]);
}

template <class T>
__device__ __forceinline__ float gemv_weight(const GemvArgs& p, std::int64_t n, std::int64_t k) {
  return gemv_weight<T>(p, static_cast<const char*>(p.w) + n * p.w_pitch,
                        static_cast<const T*>(p.scales) + n, p.scales_pitch, k);
}

template <class T>
__global__ void __launch_bounds__(256) gemv_naive(const GemvArgs p) {
  const std::int64_t total = static_cast<std::int64_t>(p.m) * p.n;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * 8;
  for (std::int64_t i = blockIdx.x * 8ll + threadIdx.x / 32; i < total; i += step) {
    const std::int64_t m = i / p.n, n = i % p.n;
    const T* x = static_cast<const T*>(p.x) + m * p.x_pitch;
    float sum = 0.0f;
    for (std::int64_t k = threadIdx.x % 32; k < p.k; k += 32) {
      sum += to_float(x[k]) * gemv_weight<T>(p, n, k);
    }
    sum = warp_reduce<Sum>(sum);
    if (threadIdx.x % 32 == 0) {
      const float v = epilogue_value<T>(p.epilogue, sum, 0, m, n);
      static_cast<T*>(p.y)[m * p.y_pitch + n] = from_float<T>(v);
    }
  }
}

}  // namespace rm::cuda_ops
