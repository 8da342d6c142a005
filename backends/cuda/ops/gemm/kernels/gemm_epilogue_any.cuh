// The passes around a product: the epilogue over a c that holds the plain product, the slope of an
// activation in backward, sums of a bias gradient. Bound by memory.
#pragma once

#include "_shim/async_shim.cuh"
#include "_shim/epilogue_shim.cuh"
#include "gemm/kernels/gemm_args.hpp"
#include "gemm/kernels/gemm_fast_any.cuh"

namespace rm::cuda_ops {

/// c = epilogue(c), kV elements a thread and turn.
template <class T, int kV>
__global__ void __launch_bounds__(256) gemm_epilogue(const GemmArgs p) {
  const std::int64_t per_row = p.n / kV, total = per_row * p.m * p.batch;
  for (std::int64_t i = blockIdx.x * 256ll + threadIdx.x; i < total; i += gridDim.x * 256ll) {
    const std::int64_t row = i / per_row, n = (i - row * per_row) * kV;
    const std::int64_t batch = row / p.m, m = row - batch * p.m;
    T* c = static_cast<T*>(p.c) + batch * p.c_batch + m * p.c_pitch + n;
    float v[kV];
    load_vec<T, kV>(c, v);
    epilogue_values<T, kV>(p.epilogue, v, batch, m, n);
    store_vec<T, kV>(c, v);
  }
}

/// One share of gemm_slope's rows.
template <class T, int kV>
__device__ __forceinline__ void slope_share(const GemmSlopeArgs& p, std::int64_t n,
                                            std::int64_t share, float (&part)[8][32 * kV + 1]) {
  const std::int64_t first = share * p.block_rows;
  float sum[kV] = {};
  if (n < p.n) {
#pragma unroll 4
    for (int r = threadIdx.y; r < p.block_rows; r += 8) {
      const std::int64_t row = first + r;
      if (row >= p.rows) break;
      const std::int64_t batch = row / p.rows_a_batch, m = row - batch * p.rows_a_batch;
      float d[kV], x[kV];
      load_vec<T, kV>(static_cast<const T*>(p.dc) + batch * p.dc_batch + m * p.dc_pitch + n, d);
      if (p.dt) {
        load_vec<T, kV>(static_cast<const T*>(p.aux) + batch * p.aux_batch + m * p.aux_pitch + n,
                        x);
        multiply_slopes<sizeof(T) == 2>(p.activation, d, x, p.slope);
        store_vec<T, kV>(static_cast<T*>(p.dt) + row * p.dt_pitch + n, d);
      }
#pragma unroll
      for (int j = 0; j < kV; ++j) sum[j] += d[j];
    }
  }
  if (p.partial == nullptr) return;
  __syncthreads();  // the sums of the share before have been read
#pragma unroll
  for (int j = 0; j < kV; ++j) part[threadIdx.y][threadIdx.x * kV + j] = sum[j];
  __syncthreads();
  for (int i = threadIdx.y * 32 + threadIdx.x; i < 32 * kV; i += 256) {
    const std::int64_t column = blockIdx.x * 32ll * kV + i;
    if (column >= p.n) break;
    float total = 0.0f;
#pragma unroll
    for (int r = 0; r < 8; ++r) total += part[r][i];
    p.partial[share * p.n + column] = total;
  }
}

/// Blocks of 32 x 8 threads: 32 * kV columns by p.block_rows rows, and every gridDim.y-th such
/// share of the rows after them. The order of sums is fixed.
template <class T, int kV>
__global__ void __launch_bounds__(256) gemm_slope(const GemmSlopeArgs p) {
  __shared__ float part[8][32 * kV + 1];
  wait_for_previous();
  launch_dependents();
  const std::int64_t n = (blockIdx.x * 32ll + threadIdx.x) * kV;
  const std::int64_t shares = (p.rows + p.block_rows - 1) / p.block_rows;
  for (std::int64_t share = blockIdx.y; share < shares; share += gridDim.y) {
    slope_share<T, kV>(p, n, share, part);
  }
}

/// One warp a sum.
template <class In, class T>
__global__ void __launch_bounds__(256) gemm_sums(const In* in, T* out, const GemmSums p) {
  const std::int64_t i = blockIdx.x * 8ll + threadIdx.x / 32;
  if (i >= p.results) return;
  in += i / p.rows * p.batch + i % p.rows * p.outer;
  float sum = 0.0f;
  for (std::int64_t j = threadIdx.x % 32; j < p.count; j += 32) sum += to_float(in[j * p.inner]);
  sum = warp_reduce<Sum>(sum);
  if (threadIdx.x % 32 == 0) out[i] = from_float<T>(sum);
}

/// The same where neighbouring results lie side by side: 32 results by 8 lanes a block.
template <class T>
__global__ void __launch_bounds__(256)
    gemm_column_sums(const float* in, T* out, std::int64_t results, std::int64_t count) {
  __shared__ float part[8][33];
  const std::int64_t column = blockIdx.x * 32ll + threadIdx.x;
  float sum = 0.0f;
  if (column < results) {
    for (std::int64_t j = threadIdx.y; j < count; j += 8) sum += in[j * results + column];
  }
  part[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= results) return;
#pragma unroll
  for (int r = 1; r < 8; ++r) sum += part[r][threadIdx.x];
  out[column] = from_float<T>(sum);
}

}  // namespace rm::cuda_ops
