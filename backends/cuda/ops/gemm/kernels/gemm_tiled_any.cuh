// 64 x 64 tiles of c, 16 deep, fp32 FMAs, any strides, sizes and dtypes. The last resort.
#pragma once

#include "_shim/epilogue_shim.cuh"
#include "gemm/kernels/gemm_args.hpp"

namespace rm::cuda_ops {

inline constexpr int kTiled = 64, kTiledDepth = 16;

template <class T>
__global__ void __launch_bounds__(256) gemm_tiled(const GemmArgs p) {
  __shared__ float a_tile[kTiledDepth][kTiled + 4], b_tile[kTiledDepth][kTiled + 4];
  const std::int64_t tiles_n = (p.n + kTiled - 1) / kTiled, tiles_m = (p.m + kTiled - 1) / kTiled;
  const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  for (std::int64_t tile = blockIdx.x; tile < tiles_n * tiles_m * p.batch; tile += gridDim.x) {
    const std::int64_t batch = tile / (tiles_n * tiles_m), rest = tile % (tiles_n * tiles_m);
    const std::int64_t m0 = rest / tiles_n * kTiled, n0 = rest % tiles_n * kTiled;
    const T* a = static_cast<const T*>(p.a) + batch * p.a_batch;
    const T* b = static_cast<const T*>(p.b) + batch * p.b_batch;
    float sum[4][4] = {};
    for (std::int64_t k0 = 0; k0 < p.k; k0 += kTiledDepth) {
      for (int i = threadIdx.x; i < kTiled * kTiledDepth; i += 256) {
        // neighbouring threads read neighbouring addresses, whichever axis is dense
        const bool a_k = p.a_column == 1, b_k = p.b_row == 1;
        const int am = a_k ? i / kTiledDepth : i % kTiled, ak = a_k ? i % kTiledDepth : i / kTiled;
        const int bn = b_k ? i / kTiledDepth : i % kTiled, bk = b_k ? i % kTiledDepth : i / kTiled;
        a_tile[ak][am] = m0 + am < p.m && k0 + ak < p.k
                             ? to_float(a[(m0 + am) * p.a_row + (k0 + ak) * p.a_column])
                             : 0.0f;
        b_tile[bk][bn] = n0 + bn < p.n && k0 + bk < p.k
                             ? to_float(b[(k0 + bk) * p.b_row + (n0 + bn) * p.b_column])
                             : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kTiledDepth; ++k) {
        float x[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = a_tile[k][ty + 16 * i], y[i] = b_tile[k][tx + 16 * i];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][j] += x[i] * y[j];
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::int64_t m = m0 + ty + 16 * i, n = n0 + tx + 16 * j;
        if (m >= p.m || n >= p.n) continue;
        const float v = epilogue_value<T>(p.epilogue, sum[i][j], batch, m, n);
        static_cast<T*>(p.c)[batch * p.c_batch + m * p.c_pitch + n] = from_float<T>(v);
      }
    }
  }
}

}  // namespace rm::cuda_ops
