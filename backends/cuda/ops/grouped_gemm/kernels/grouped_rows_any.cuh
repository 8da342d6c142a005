// Few rows a group: a warp takes four columns of up to four rows, its lanes vectors along the depth.
// Matrices whose depth is the dense axis, as torch's Linear has it. Bound: reading the matrices.
#pragma once

#include "grouped_gemm/kernels/grouped_tiles.cuh"

namespace rm::cuda_ops {

inline constexpr int kGroupedFew = 4, kGroupedColumns = 4, kGroupedWarps = 4;

template <class T>
__global__ void __launch_bounds__(32 * kGroupedWarps)
    grouped_rows(const __grid_constant__ GroupedArgs p) {
  constexpr int V = kVec<T>;
  overlap_begin();
  const GroupedTile tile = grouped_tile<kGroupedFew>(p, blockIdx.x);
  if (tile.rows == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const T* x = static_cast<const T*>(p.x) + tile.first * p.x_row;
  const std::int64_t depth = tile.group < p.groups ? p.depth : 0;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.y) * kGroupedWarps * kGroupedColumns;
  for (std::int64_t n0 = (static_cast<std::int64_t>(blockIdx.y) * kGroupedWarps + warp) * kGroupedColumns;
       n0 < p.columns; n0 += step) {
    float sum[kGroupedFew][kGroupedColumns] = {};
    const T* w[kGroupedColumns];
#pragma unroll
    for (int c = 0; c < kGroupedColumns; ++c) {  // beyond the last: the last, not stored
      const std::int64_t n = n0 + c < p.columns ? n0 + c : p.columns - 1;
      w[c] = static_cast<const T*>(p.w) + tile.group * p.w_group + n * p.w_column;
    }
    for (std::int64_t k = lane * V; k < depth; k += 32 * V) {
      float a[kGroupedColumns][V];
#pragma unroll
      for (int c = 0; c < kGroupedColumns; ++c) load_vec<T, V>(w[c] + k, a[c]);
#pragma unroll
      for (int r = 0; r < kGroupedFew; ++r) {
        if (r >= tile.rows) break;
        float b[V];
        load_vec<T, V>(x + r * p.x_row + k, b);
#pragma unroll
        for (int c = 0; c < kGroupedColumns; ++c) {
#pragma unroll
          for (int i = 0; i < V; ++i) sum[r][c] += a[c][i] * b[i];
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kGroupedFew; ++r) {
#pragma unroll
      for (int c = 0; c < kGroupedColumns; ++c) {
        const float total = warp_reduce<Sum>(sum[r][c]);
        if (lane == r * kGroupedColumns + c && r < tile.rows && n0 + c < p.columns) {
          static_cast<T*>(p.y)[(tile.first + r) * p.y_row + (n0 + c) * p.y_column] =
              from_float<T>(total);
        }
      }
    }
  }
}

}  // namespace rm::cuda_ops
