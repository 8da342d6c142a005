// What the gradient's kernels read of every query row: its log-sum-exp, and the sum of d_o o.
// Bound: reading o and d_o.
#pragma once

#include "sdpa/kernels/sdpa_common.cuh"

namespace rm::cuda_ops {

/// Rows of statistics: log-sum-exp in log2 units (+inf where a row sees nothing or is none), and
/// delta. Padded, so that tiles of them are whole.
inline constexpr int kGradPad = 64;
__host__ __device__ inline int grad_padded(int rows) {
  return (rows + kGradPad - 1) / kGradPad * kGradPad;
}

/// The statistics of every row, a warp each: [B, H, padded S] twice, from `delta` on. kVectors:
/// rows are 16-byte aligned, and the head dim a multiple of 8.
template <class T, bool kVectors>
__global__ void __launch_bounds__(128) sdpa_backward_statistics(const SdpaGradArgs p) {
  const SdpaArgs& f = p.f;
  const int padded = grad_padded(f.rows), lane = threadIdx.x % 32;
  const std::int64_t total = static_cast<std::int64_t>(f.batch) * f.heads * padded;
  for (std::int64_t i = blockIdx.x * 4ll + threadIdx.x / 32; i < total; i += gridDim.x * 4ll) {
    const int s = static_cast<int>(i % padded), h = static_cast<int>(i / padded % f.heads);
    const int b = static_cast<int>(i / padded / f.heads);
    float sum = 0.0f, lse = __int_as_float(0x7f800000);
    if (s < f.rows) {
      const T* o = static_cast<const T*>(f.o) + b * f.o_batch + h * f.o_head + s * f.o_row;
      const T* d_o =
          static_cast<const T*>(p.d_o) + b * p.d_o_batch + h * p.d_o_head + s * p.d_o_row;
      if constexpr (kVectors) {
        for (int d = lane * 8; d < f.dim; d += 256) {
          float x[8], y[8];
          load_vec(o + d, x), load_vec(d_o + d, y);
#pragma unroll
          for (int k = 0; k < 8; ++k) sum += x[k] * y[k];
        }
      } else {
        for (int d = lane; d < f.dim; d += 32) sum += to_float(o[d]) * to_float(d_o[d]);
      }
      sum = warp_reduce<Sum>(sum);
      const float found = f.lse[(static_cast<std::int64_t>(b) * f.heads + h) * f.rows + s];
      if (found != minus_infinity()) lse = found * kLog2E;
    }
    if (lane == 0) p.delta[i] = lse, p.delta[total + i] = sum;
  }
}

}  // namespace rm::cuda_ops
