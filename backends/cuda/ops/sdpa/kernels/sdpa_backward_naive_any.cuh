// The gradient of attention, one warp a row: delta and dq by query rows, dk and dv by key rows,
// each sum in the order of its rows. Any head dim up to 512, any strides, masks, all dtypes.
#pragma once

#include "sdpa/kernels/sdpa_naive_any.cuh"

namespace rm::cuda_ops {

/// A row of up to 512 elements, 16 a lane.
template <class T>
__device__ __forceinline__ void naive_row(const void* base, std::int64_t at, int dim,
                                          float (&out)[kNaivePer]) {
  const T* from = static_cast<const T*>(base) + at;
#pragma unroll
  for (int d = 0; d < kNaivePer; ++d) {
    const int column = threadIdx.x % 32 + 32 * d;
    out[d] = column < dim ? to_float(from[column]) : 0.0f;
  }
}
template <class T>
__device__ __forceinline__ void naive_store(void* base, std::int64_t at, int dim,
                                            const float (&in)[kNaivePer]) {
  T* to = static_cast<T*>(base) + at;
#pragma unroll
  for (int d = 0; d < kNaivePer; ++d) {
    const int column = threadIdx.x % 32 + 32 * d;
    if (column < dim) to[column] = from_float<T>(in[d]);
  }
}
/// The sum of a x b over the row, in all lanes; b in memory.
template <class T>
__device__ __forceinline__ float naive_product(const float (&a)[kNaivePer], const void* base,
                                               std::int64_t at, int dim) {
  const T* b = static_cast<const T*>(base) + at;
  float sum = 0.0f;
#pragma unroll
  for (int d = 0; d < kNaivePer; ++d) {
    const int column = threadIdx.x % 32 + 32 * d;
    if (column < dim) sum += a[d] * to_float(b[column]);
  }
  return warp_reduce<Sum>(sum);
}
template <class T>
__device__ __forceinline__ void naive_add(float (&sum)[kNaivePer], float weight, const void* base,
                                          std::int64_t at, int dim) {
  const T* b = static_cast<const T*>(base) + at;
#pragma unroll
  for (int d = 0; d < kNaivePer; ++d) {
    const int column = threadIdx.x % 32 + 32 * d;
    if (column < dim) sum[d] += weight * to_float(b[column]);
  }
}

/// delta = sum of d_o o, and dq, of each query row.
template <class T>
__global__ void __launch_bounds__(128) sdpa_backward_naive_q(const SdpaGradArgs p) {
  const SdpaArgs& f = p.f;
  const std::int64_t total = static_cast<std::int64_t>(f.batch) * f.heads * f.rows;
  for (std::int64_t i = blockIdx.x * 4ll + threadIdx.x / 32; i < total; i += gridDim.x * 4ll) {
    const int s = static_cast<int>(i % f.rows), h = static_cast<int>(i / f.rows % f.heads);
    const int b = static_cast<int>(i / f.rows / f.heads), g = h / f.ratio;
    float q[kNaivePer], d_o[kNaivePer], sum[kNaivePer] = {};
    naive_row<T>(f.q, b * f.q_batch + h * f.q_head + s * f.q_row, f.dim, q);
    naive_row<T>(p.d_o, b * p.d_o_batch + h * p.d_o_head + s * p.d_o_row, f.dim, d_o);
    const float delta =
        naive_product<T>(d_o, f.o, b * f.o_batch + h * f.o_head + s * f.o_row, f.dim);
    if (threadIdx.x % 32 == 0) p.delta[i] = delta;
    const float lse = f.lse[i] * kLog2E;
    const int keys = visible_keys(f, keys_of(f, b), s);
    for (int j = 0; j < keys; ++j) {
      const std::int64_t k_at = b * f.k_batch + g * f.k_head + j * f.k_row;
      const float x = masked_score<T>(f, naive_product<T>(q, f.k, k_at, f.dim), b, h, s, j);
      if (x == minus_infinity()) continue;
      const float dp =
          naive_product<T>(d_o, f.v, b * f.v_batch + g * f.v_head + j * f.v_row, f.dim);
      naive_add<T>(sum, exp2f(x - lse) * (dp - delta) * f.scale, f.k, k_at, f.dim);
    }
    naive_store<T>(p.dq, b * p.dq_batch + h * p.dq_head + s * p.dq_row, f.dim, sum);
  }
}

/// dk and dv of each key row: over the heads of its group, then over the queries that see it.
template <class T>
__global__ void __launch_bounds__(128) sdpa_backward_naive_k(const SdpaGradArgs p) {
  const SdpaArgs& f = p.f;
  const std::int64_t total = static_cast<std::int64_t>(f.batch) * f.groups * f.keys;
  for (std::int64_t i = blockIdx.x * 4ll + threadIdx.x / 32; i < total; i += gridDim.x * 4ll) {
    const int j = static_cast<int>(i % f.keys), g = static_cast<int>(i / f.keys % f.groups);
    const int b = static_cast<int>(i / f.keys / f.groups), keys = keys_of(f, b);
    float k[kNaivePer], v[kNaivePer], dk[kNaivePer] = {}, dv[kNaivePer] = {};
    naive_row<T>(f.k, b * f.k_batch + g * f.k_head + j * f.k_row, f.dim, k);
    naive_row<T>(f.v, b * f.v_batch + g * f.v_head + j * f.v_row, f.dim, v);
    for (int h = g * f.ratio; h < (g + 1) * f.ratio && j < keys; ++h) {
      for (int s = 0; s < f.rows; ++s) {
        if (j >= visible_keys(f, keys, s)) continue;
        const std::int64_t q_at = b * f.q_batch + h * f.q_head + s * f.q_row,
                           d_o_at = b * p.d_o_batch + h * p.d_o_head + s * p.d_o_row,
                           row = (static_cast<std::int64_t>(b) * f.heads + h) * f.rows + s;
        const float x = masked_score<T>(f, naive_product<T>(k, f.q, q_at, f.dim), b, h, s, j);
        if (x == minus_infinity()) continue;
        const float weight = exp2f(x - f.lse[row] * kLog2E);
        const float dp = naive_product<T>(v, p.d_o, d_o_at, f.dim);
        naive_add<T>(dv, weight, p.d_o, d_o_at, f.dim);
        naive_add<T>(dk, weight * (dp - p.delta[row]) * f.scale, f.q, q_at, f.dim);
      }
    }
    naive_store<T>(p.dk, b * p.dk_batch + g * p.dk_head + j * p.dk_row, f.dim, dk);
    naive_store<T>(p.dv, b * p.dv_batch + g * p.dv_head + j * p.dv_row, f.dim, dv);
  }
}

}  // namespace rm::cuda_ops
