// A group of products, a warp an element, element by element: any K, any address, weights of any bits.
#pragma once

#include "gemv/kernels/gemv_naive_any.cuh"

namespace rm::cuda_ops {

/// Mean of a row, and what its distances from it are multiplied by.
struct GemvMoments {
  float mean = 0.0f, inverse = 1.0f;
};
/// Of K elements, by a warp.
template <class T>
__device__ __forceinline__ GemvMoments gemv_moments(const T* x, int k, float eps) {
  float sum = 0.0f, squares = 0.0f;
  for (int at = threadIdx.x % 32; at < k; at += 32) sum += to_float(x[at]);
  const float mean = warp_reduce<Sum>(sum) / static_cast<float>(k);
  for (int at = threadIdx.x % 32; at < k; at += 32) {
    const float d = to_float(x[at]) - mean;
    squares += d * d;
  }
  return {mean, rsqrtf(warp_reduce<Sum>(squares) / static_cast<float>(k) + eps)};
}

/// Element i of the results, of which gated products have those of one weight; by a warp.
template <class T>
__device__ __forceinline__ void gemv_group_element(const GemvArgs& p, const GemvQuantGroupArgs& q,
                                                   std::int64_t i) {
  const GemvGroupArgs& g = q.group;
  const std::int64_t each = g.gated ? p.n / 2 : p.n, m = p.m == 1 ? 0 : i / each;  // elements of a row
  i -= m * each;
  const int part = g.gated ? 0 : (i >= g.first[1] ? 1 : 0) + (i >= g.first[2] ? 1 : 0);
  const std::int64_t n = g.gated ? i : i - g.first[part];
  const std::int64_t pitch = (part < 2 ? min(g.first[part + 1], p.n) : p.n) - g.first[part];
  const T* x = static_cast<const T*>(p.x) + m * p.x_pitch;
  const auto weight = [&](int of, int k) {
    if (g.turned) return to_float(static_cast<const T*>(g.w[0])[k * static_cast<std::int64_t>(p.n) + n]);
    return gemv_weight<T>(p, static_cast<const char*>(g.w[of]) + n * p.w_pitch,
                          static_cast<const T*>(q.scales[of]) + n, pitch, k);
  };
  const bool centred = g.norm && g.centred;
  const GemvMoments moments = centred ? gemv_moments<T>(x, p.k, g.eps) : GemvMoments{};
  float v = 0.0f, u = 0.0f, squares = 0.0f;
  for (int at = threadIdx.x % 32; at < p.k; at += 32) {
    float a = to_float(x[at]);
    if (centred) {
      a = (a - moments.mean) * moments.inverse * to_float(static_cast<const T*>(g.norm)[at]);
      if (g.norm_bias) a += to_float(static_cast<const T*>(g.norm_bias)[at]);
    } else if (g.norm) {
      squares += a * a;
      a *= to_float(static_cast<const T*>(g.norm)[at]) + g.weight_offset;
    }
    v += a * weight(part, at);
    if (g.gated) u += a * weight(1, at);
  }
  v = warp_reduce<Sum>(v), u = warp_reduce<Sum>(u), squares = warp_reduce<Sum>(squares);
  if (threadIdx.x % 32 != 0) return;
  if (g.norm && !centred) {
    const float inverse = rsqrtf(squares / static_cast<float>(p.k) + g.eps);
    v *= inverse, u *= inverse;
  }
  if (g.bias[part]) v += to_float(static_cast<const T*>(g.bias[part])[n]);
  v = activate<sizeof(T) == 2>(g.activation, v, 0.0f);
  if (g.gated) v *= u;
  if (g.residual) v += to_float(static_cast<const T*>(g.residual)[n + m * pitch]);
  static_cast<T*>(g.y[part])[n + m * pitch] = from_float<T>(v);
}

template <class T>
__global__ void __launch_bounds__(256)
    gemv_group_naive(const GemvArgs p, const GemvQuantGroupArgs q, std::int64_t rows) {
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * 8;
  for (std::int64_t i = blockIdx.x * 8ll + threadIdx.x / 32; i < rows; i += step) {
    gemv_group_element<T>(p, q, i);
  }
}

}  // namespace rm::cuda_ops
