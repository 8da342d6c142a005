// 64 x 64 tiles of y, 16 deep, fp32 multiply-adds, any strides, sizes and dtypes.
#pragma once

#include "grouped_gemm/kernels/grouped_tiles.cuh"

namespace rm::cuda_ops {

inline constexpr int kGroupedTile = 64, kGroupedDepth = 16;

template <class T>
__global__ void __launch_bounds__(256) grouped_tiled(const __grid_constant__ GroupedArgs p) {
  __shared__ float x_tile[kGroupedDepth][kGroupedTile + 4], w_tile[kGroupedDepth][kGroupedTile + 4];
  overlap_begin();
  const GroupedTile tile = grouped_tile<kGroupedTile>(p, blockIdx.x);
  if (tile.rows == 0) return;
  const int tx = static_cast<int>(threadIdx.x) % 16, ty = static_cast<int>(threadIdx.x) / 16;
  const T* x = static_cast<const T*>(p.x) + tile.first * p.x_row;
  const T* w = static_cast<const T*>(p.w) + tile.group * p.w_group;
  const std::int64_t depth = tile.group < p.groups ? p.depth : 0;
  // neighbouring threads read neighbouring addresses, whichever axis is dense
  const bool x_deep = p.x_column == 1, w_deep = p.w_row == 1;
  for (std::int64_t n0 = static_cast<std::int64_t>(blockIdx.y) * kGroupedTile; n0 < p.columns;
       n0 += static_cast<std::int64_t>(gridDim.y) * kGroupedTile) {
    float sum[4][4] = {};
    for (std::int64_t k0 = 0; k0 < depth; k0 += kGroupedDepth) {
      for (int i = static_cast<int>(threadIdx.x); i < kGroupedTile * kGroupedDepth; i += 256) {
        const int slow = i / kGroupedDepth, fast = i % kGroupedDepth;
        const int row = i / kGroupedTile, along = i % kGroupedTile;
        const int xm = x_deep ? slow : along, xk = x_deep ? fast : row;
        const int wn = w_deep ? slow : along, wk = w_deep ? fast : row;
        x_tile[xk][xm] = xm < tile.rows && k0 + xk < depth
                             ? to_float(x[xm * p.x_row + (k0 + xk) * p.x_column])
                             : 0.0f;
        w_tile[wk][wn] = n0 + wn < p.columns && k0 + wk < depth
                             ? to_float(w[(k0 + wk) * p.w_row + (n0 + wn) * p.w_column])
                             : 0.0f;
      }
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kGroupedDepth; ++k) {
        float a[4], b[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = x_tile[k][ty + 16 * i], b[i] = w_tile[k][tx + 16 * i];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[i][j] += a[i] * b[j];
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int m = ty + 16 * i;
        const std::int64_t n = n0 + tx + 16 * j;
        if (m >= tile.rows || n >= p.columns) continue;
        static_cast<T*>(p.y)[(tile.first + m) * p.y_row + n * p.y_column] = from_float<T>(sum[i][j]);
      }
    }
  }
}

}  // namespace rm::cuda_ops
