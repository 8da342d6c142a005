// 64 x 128 tiles of y on tensor cores (mma.sync), 64 deep: asynchronous copies of 16 bytes, three stages.
// For 16-bit types whose rows are whole vectors; the matrices lie either way. Bound: tensor cores, for
// few rows a group reading the matrices.
#pragma once

#include "_shim/async_shim.cuh"
#include "grouped_gemm/kernels/grouped_tiles.cuh"

namespace rm::cuda_ops {

inline constexpr int kMmaRows = 64, kMmaColumns = 128, kMmaDepth = 64, kMmaStages = 3;
inline constexpr int kMmaStageBytes = (kMmaRows + kMmaColumns) * kMmaDepth * 2;
inline constexpr int kMmaShared = kMmaStages * kMmaStageBytes;

/// Where 16 bytes of a stage's tile lie: rows of kChunks chunks, turned so that eight rows of one chunk
/// are in different banks.
template <int kChunks>
__device__ __forceinline__ std::uint32_t mma_chunk(int row, int chunk) {
  return static_cast<std::uint32_t>((row * kChunks + (chunk ^ (row & 7))) * 16);
}

/// One step along the depth, from `k0`, of x [rows, depth] and w to the stage at `to`.
template <class T, bool kDeep>
__device__ __forceinline__ void mma_load(const GroupedArgs& p, const T* x, const T* w, int rows,
                                         std::int64_t n0, std::int64_t k0, std::uint32_t to) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kMmaRows * 8 / 256; ++i) {
    const int row = thread / 8 + i * 32, chunk = thread % 8;
    const bool valid = row < rows && k0 + chunk * 8 < p.depth;
    copy_16_async(to + mma_chunk<8>(row, chunk), valid ? x + row * p.x_row + k0 + chunk * 8 : x, valid);
  }
  to += kMmaRows * kMmaDepth * 2;
#pragma unroll
  for (int i = 0; i < kMmaColumns * 8 / 256; ++i) {
    if constexpr (kDeep) {  // a row a column of w
      const int row = thread / 8 + i * 32, chunk = thread % 8;
      const bool valid = n0 + row < p.columns && k0 + chunk * 8 < p.depth;
      copy_16_async(to + mma_chunk<8>(row, chunk),
                    valid ? w + (n0 + row) * p.w_column + k0 + chunk * 8 : w, valid);
    } else {  // a row a row of w
      const int row = thread / 16 + i * 16, chunk = thread % 16;
      const bool valid = k0 + row < p.depth && n0 + chunk * 8 < p.columns;
      copy_16_async(to + mma_chunk<16>(row, chunk),
                    valid ? w + (k0 + row) * p.w_row + n0 + chunk * 8 : w, valid);
    }
  }
}

/// A warp's 32 x 32 sums, from a stage at `at`.
template <class T, bool kDeep>
__device__ __forceinline__ void mma_step(float (&sum)[2][4][4], std::uint32_t at, int warp_m,
                                         int warp_n) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const std::uint32_t w_at = at + kMmaRows * kMmaDepth * 2;
#pragma unroll
  for (int k = 0; k < kMmaDepth / 16; ++k) {
    std::uint32_t a[2][4], b[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrix_x4(a[i], at + mma_chunk<8>(warp_m + 16 * i + lane % 16, 2 * k + lane / 16));
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int column = warp_n + 16 * j + lane / 16 * 8;
      if constexpr (kDeep) {
        load_matrix_x4(b[j], w_at + mma_chunk<8>(column + lane % 8, 2 * k + lane / 8 % 2));
      } else {
        load_matrix_x4_transposed(b[j], w_at + mma_chunk<16>(16 * k + lane % 16, column / 8));
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        mma_16816<T>(sum[i][j], a[i][0], a[i][1], a[i][2], a[i][3], b[j / 2][j % 2 * 2],
                     b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
}

/// kDeep: the depth is w's dense axis, else the columns are.
template <class T, bool kDeep>
__global__ void __launch_bounds__(256) grouped_mma(const __grid_constant__ GroupedArgs p) {
  extern __shared__ __align__(128) unsigned char grouped_shared[];
  overlap_begin();
  const GroupedTile tile = grouped_tile<kMmaRows>(p, blockIdx.x);
  if (tile.rows == 0) return;
  const std::uint32_t shared = shared_address(grouped_shared);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int warp_m = warp % 2 * 32, warp_n = warp / 2 * 32;
  const T* x = static_cast<const T*>(p.x) + tile.first * p.x_row;
  const T* w = static_cast<const T*>(p.w) + tile.group * p.w_group;
  const auto steps = tile.group < p.groups
                         ? static_cast<int>((p.depth + kMmaDepth - 1) / kMmaDepth)
                         : 0;
  for (std::int64_t n0 = static_cast<std::int64_t>(blockIdx.y) * kMmaColumns; n0 < p.columns;
       n0 += static_cast<std::int64_t>(gridDim.y) * kMmaColumns) {
    const auto load = [&](int step) {
      if (step < steps) {
        mma_load<T, kDeep>(p, x, w, tile.rows, n0, static_cast<std::int64_t>(step) * kMmaDepth,
                           shared + step % kMmaStages * kMmaStageBytes);
      }
      copy_group_end();
    };
    float sum[2][4][4] = {};
#pragma unroll
    for (int s = 0; s < kMmaStages - 1; ++s) load(s);
    for (int step = 0; step < steps; ++step) {
      copy_groups_wait<kMmaStages - 2>();
      __syncthreads();  // the step is there, and all have read the stage that is filled next
      load(step + kMmaStages - 1);
      mma_step<T, kDeep>(sum, shared + step % kMmaStages * kMmaStageBytes, warp_m, warp_n);
    }
    copy_groups_wait<0>();
    __syncthreads();  // the stages are read
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int m = warp_m + 16 * i + lane / 4 + e / 2 * 8;
          const std::int64_t n = n0 + warp_n + 8 * j + lane % 4 * 2 + e % 2;
          if (m >= tile.rows || n >= p.columns) continue;
          static_cast<T*>(p.y)[(tile.first + m) * p.y_row + n * p.y_column] =
              from_float<T>(sum[i][j][e]);
        }
      }
    }
  }
}

}  // namespace rm::cuda_ops
