// One warp a query row, key after key: any head dim up to 512, any strides, all dtypes.
#pragma once

#include "sdpa/kernels/sdpa_common.cuh"

namespace rm::cuda_ops {

inline constexpr int kNaivePer = 16;  // elements of a row a lane holds: D <= 512

template <class T>
__global__ void __launch_bounds__(128) sdpa_naive(const SdpaArgs p) {
  const int lane = threadIdx.x % 32;
  const std::int64_t total = static_cast<std::int64_t>(p.batch) * p.heads * p.rows;
  const std::int64_t first = blockIdx.x * 4ll + threadIdx.x / 32, step = gridDim.x * 4ll;
  for (std::int64_t i = first; i < total; i += step) {
    const int s = static_cast<int>(i % p.rows), h = static_cast<int>(i / p.rows % p.heads);
    const int b = static_cast<int>(i / p.rows / p.heads), g = h / p.ratio;
    const T* q = static_cast<const T*>(p.q) + b * p.q_batch + h * p.q_head + s * p.q_row;
    float query[kNaivePer], sum[kNaivePer];
#pragma unroll
    for (int d = 0; d < kNaivePer; ++d) {
      query[d] = lane + 32 * d < p.dim ? to_float(q[lane + 32 * d]) : 0.0f;
      sum[d] = 0.0f;
    }
    float top = minus_infinity(), total_weight = 0.0f;
    const int keys = visible_keys(p, keys_of(p, b), s);
    for (int j = 0; j < keys; ++j) {
      const T* k = static_cast<const T*>(p.k) + b * p.k_batch + g * p.k_head + j * p.k_row;
      const T* v = static_cast<const T*>(p.v) + b * p.v_batch + g * p.v_head + j * p.v_row;
      float product = 0.0f;
#pragma unroll
      for (int d = 0; d < kNaivePer; ++d) {
        if (lane + 32 * d < p.dim) product += query[d] * to_float(k[lane + 32 * d]);
      }
      const float x = masked_score<T>(p, warp_reduce<Sum>(product), b, h, s, j);
      const float higher = Max{}(top, x);
      if (higher == minus_infinity()) continue;
      const float keep = exp2f(top - higher), weight = exp2f(x - higher);
      top = higher;
      total_weight = total_weight * keep + weight;
#pragma unroll
      for (int d = 0; d < kNaivePer; ++d) {
        if (lane + 32 * d < p.dim) {
          sum[d] = sum[d] * keep + (weight == 0.0f ? 0.0f : weight * to_float(v[lane + 32 * d]));
        }
      }
    }
    T* o = static_cast<T*>(p.o) + b * p.o_batch + h * p.o_head + s * p.o_row;
    const float scale = total_weight == 0.0f ? 0.0f : 1.0f / total_weight;
#pragma unroll
    for (int d = 0; d < kNaivePer; ++d) {
      if (lane + 32 * d < p.dim) o[lane + 32 * d] = from_float<T>(sum[d] * scale);
    }
    if (p.lse && lane == 0) p.lse[i] = top / kLog2E + logf(total_weight);
  }
}

}  // namespace rm::cuda_ops
