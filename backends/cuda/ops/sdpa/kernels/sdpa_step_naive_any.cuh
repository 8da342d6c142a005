// A step of decoding wherever its tensors begin: one warp a query row, key after key, as sdpa_naive_any.
// The new key and value are in registers of every warp of their key head; one of them writes them.
#pragma once

#include "sdpa/kernels/sdpa_common.cuh"

namespace rm::cuda_ops {

inline constexpr int kStepNaivePer = 8;  // elements of a row a lane holds: D <= 256, whole 64s

/// Elements lane, lane + 32, .. of a row rotated by halves, rounded as a row in memory is.
template <class T>
__device__ __forceinline__ void step_rotated(const SdpaArgs& p, const SdpaStepArgs& f, int b,
                                             const T* row, float (&out)[kStepNaivePer]) {
  const int lane = threadIdx.x % 32, half = p.dim / 2;
  const T* cos = static_cast<const T*>(f.cos) + b * f.cos_batch;
  const T* sin = static_cast<const T*>(f.sin) + b * f.sin_batch;
#pragma unroll
  for (int i = 0; i < kStepNaivePer; ++i) {
    const int d = lane + 32 * i;
    out[i] = 0.0f;
    if (d >= p.dim) continue;
    out[i] = to_float(row[d]);
    if (f.cos == nullptr) continue;
    const float partner = d < half ? -to_float(row[d + half]) : to_float(row[d - half]);
    const float turned = to_float(row[d]) * to_float(cos[d]) + partner * to_float(sin[d]);
    out[i] = to_float(from_float<T>(turned));
  }
}

template <class T>
__global__ void __launch_bounds__(128) sdpa_step_naive(const SdpaArgs p, const SdpaStepArgs f) {
  constexpr int kPer = kStepNaivePer;
  const int lane = threadIdx.x % 32;
  const std::int64_t total = static_cast<std::int64_t>(p.batch) * p.heads;
  const std::int64_t first = blockIdx.x * 4ll + threadIdx.x / 32, step = gridDim.x * 4ll;
  const std::int64_t position = f.position_is_64 ? *static_cast<const long long*>(f.position)
                                                 : *static_cast<const int*>(f.position);
  for (std::int64_t at = first; at < total; at += step) {
    const int b = static_cast<int>(at / p.heads), h = static_cast<int>(at % p.heads), g = h / p.ratio;
    float query[kPer], k_new[kPer], v_new[kPer], sum[kPer] = {};
    step_rotated<T>(p, f, b, static_cast<const T*>(p.q) + b * p.q_batch + h * p.q_head, query);
    step_rotated<T>(p, f, b, static_cast<const T*>(f.k) + b * f.k_batch + g * f.k_head, k_new);
    const T* value = static_cast<const T*>(f.v) + b * f.v_batch + g * f.v_head;
    T* k_row = static_cast<T*>(f.k_cache) + b * p.k_batch + g * p.k_head + position * p.k_row;
    T* v_row = static_cast<T*>(f.v_cache) + b * p.v_batch + g * p.v_head + position * p.v_row;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      const int d = lane + 32 * i;
      v_new[i] = d < p.dim ? to_float(value[d]) : 0.0f;
      // A position outside of the cache writes nothing (api.hpp).
      if (h % p.ratio != 0 || d >= p.dim || position < 0 || position >= p.keys) continue;
      k_row[d] = from_float<T>(k_new[i]), v_row[d] = value[d];
    }
    float top = minus_infinity(), total_weight = 0.0f;
    const int keys = keys_of(p, b);
    for (int j = 0; j < keys; ++j) {
      const bool is_new = j == position;  // its row of the caches is not read
      const T* k = static_cast<const T*>(p.k) + b * p.k_batch + g * p.k_head + j * p.k_row;
      const T* v = static_cast<const T*>(p.v) + b * p.v_batch + g * p.v_head + j * p.v_row;
      float product = 0.0f;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int d = lane + 32 * i;
        if (d < p.dim) product += query[i] * (is_new ? k_new[i] : to_float(k[d]));
      }
      const float x = masked_score<T>(p, warp_reduce<Sum>(product), b, h, 0, j);
      const float higher = Max{}(top, x);
      if (higher == minus_infinity()) continue;
      const float keep = exp2f(top - higher), weight = exp2f(x - higher);
      top = higher, total_weight = total_weight * keep + weight;
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        const int d = lane + 32 * i;
        if (d >= p.dim) continue;
        const float of = weight == 0.0f ? 0.0f : is_new ? v_new[i] : to_float(v[d]);
        sum[i] = sum[i] * keep + weight * of;
      }
    }
    T* o = static_cast<T*>(p.o) + b * p.o_batch + h * p.o_head;
    const float scale = total_weight == 0.0f ? 0.0f : 1.0f / total_weight;
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      if (lane + 32 * i < p.dim) o[lane + 32 * i] = from_float<T>(sum[i] * scale);
    }
  }
}

}  // namespace rm::cuda_ops
