// The gradient of attention by multiply-adds, for what tensor cores would round or cannot read:
// float32, odd head dims, unaligned rows. As on Hopper a block keeps 64 rows of one side and goes
// through tiles of the other, dq in one launch, dk and dv in another, each sum in a fixed order. A
// thread of 16 x 16 takes 4 rows and every 16th column of a tile. D <= 256. Bound: multiply-adds.
#pragma once

#include "sdpa/kernels/sdpa_backward_statistics_any.cuh"
#include "sdpa/kernels/sdpa_tiles_common_any.cuh"

namespace rm::cuda_ops {

template <int kHeadDim>
struct GradTilesShape {
  static constexpr int kD = kHeadDim, kRows = 64, kTile = kD > 128 ? 32 : 64, kThreads = 256;
  static constexpr int kPitch = kD + 4, kWeights = kTile + 4;
  static constexpr int kMemory = 4 * (2 * (kRows + kTile) * kPitch + kRows * kWeights);
};

/// sum += values tile, by way of `weights` in shared memory, where a warp has its own rows.
template <int kD, int kN>
__device__ __forceinline__ void grad_tiles_add(float (&sum)[4][kD / 64][4],
                                               const float (&values)[4][kN], float* weights,
                                               const float* tile, int row0, int lane) {
  constexpr int kPitch = kN * 16 + 4;
  __syncwarp();  // the weights before are no longer read
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) weights[(row0 + i) * kPitch + lane + 16 * j] = values[i][j];
  }
  __syncwarp();
  tiles_add<kD, kN * 16, kPitch, kD + 4>(sum, weights + row0 * kPitch, tile, lane);
}

template <class T, int kD>
__device__ __forceinline__ void grad_tiles_store(const float (&sum)[4][kD / 64][4], float scale,
                                                 T* to, std::int64_t pitch, int row0, int rows,
                                                 int dim) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (row0 + i < rows) tiles_store<T, kD>(sum[i], scale, to + (row0 + i) * pitch, dim);
  }
}

/// kQueries: dq of 64 query rows, or dk and dv of 64 key rows.
template <class T, int kD, bool kQueries>
__global__ void __launch_bounds__(256, 1) sdpa_backward_tiles(const SdpaGradArgs p) {
  using Shape = GradTilesShape<kD>;
  constexpr int kPitch = Shape::kPitch, kTile = Shape::kTile, kRows = Shape::kRows, kN = kTile / 16;
  extern __shared__ __align__(16) float memory_4[];
  float *rows_1 = memory_4, *rows_2 = rows_1 + kRows * kPitch, *tile_1 = rows_2 + kRows * kPitch,
        *tile_2 = tile_1 + kTile * kPitch, *weights = tile_2 + kTile * kPitch;
  const SdpaArgs& f = p.f;
  const int heads = kQueries ? f.heads : f.groups, b = blockIdx.y / heads,
            head = blockIdx.y % heads;
  const int first_row = (kQueries ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * kRows;
  const int row0 = threadIdx.x / 16 * 4, lane = threadIdx.x % 16, keys = keys_of(f, b);
  const int padded = grad_padded(f.rows);
  const std::int64_t all = static_cast<std::int64_t>(f.batch) * f.heads * padded;
  const auto q_at = [&](int h) {
    return static_cast<const T*>(f.q) + b * f.q_batch + h * f.q_head;
  };
  const auto d_o_at = [&](int h) {
    return static_cast<const T*>(p.d_o) + b * p.d_o_batch + h * p.d_o_head;
  };
  const int g = kQueries ? head / f.ratio : head;
  const T* k = static_cast<const T*>(f.k) + b * f.k_batch + g * f.k_head;
  const T* v = static_cast<const T*>(f.v) + b * f.v_batch + g * f.v_head;
  const auto load = [&](auto rows, float* to_1, float* to_2, bool queries, int h, int first) {
    constexpr int kCount = decltype(rows)::value;
    if (queries) {
      tiles_load<T, kD, kPitch, kCount>(to_1, q_at(h) + first * f.q_row, f.q_row, f.rows - first,
                                        f.dim, p.vectors);
      tiles_load<T, kD, kPitch, kCount>(to_2, d_o_at(h) + first * p.d_o_row, p.d_o_row,
                                        f.rows - first, f.dim, p.vectors);
    } else {
      tiles_load<T, kD, kPitch, kCount>(to_1, k + first * f.k_row, f.k_row, keys - first, f.dim,
                                        p.vectors);
      tiles_load<T, kD, kPitch, kCount>(to_2, v + first * f.v_row, f.v_row, keys - first, f.dim,
                                        p.vectors);
    }
    copy_group_end();
  };
  load(std::integral_constant<int, kRows>{}, rows_1, rows_2, kQueries, head, first_row);
  float sum_1[4][kD / 64][4] = {}, sum_2[kQueries ? 1 : 4][kD / 64][4] = {};
  int from = 0, to = f.rows;  // columns that some row sees
  if constexpr (kQueries) {
    to = visible_keys(f, keys, min(f.rows, first_row + kRows) - 1);
  } else {
    const std::int64_t sees = f.causal ? first_row - f.causal_offset : 0;
    from = static_cast<int>(sees < 0 ? 0 : sees < f.rows ? sees : f.rows) / kTile * kTile;
    if (first_row >= keys) to = 0;
  }
  for (int turn = 0; turn < (kQueries ? 1 : f.ratio); ++turn) {
    const int h = kQueries ? head : head * f.ratio + turn;
    const float* lse = p.delta + (static_cast<std::int64_t>(b) * f.heads + h) * padded;
    for (int first = from; first < to; first += kTile) {
      __syncthreads();  // the tiles before are no longer read
      load(std::integral_constant<int, kTile>{}, tile_1, tile_2, !kQueries, h, first);
      copy_groups_wait<0>();
      __syncthreads();
      float score[4][kN], slope[4][kN];
      tiles_products<kD>(score, rows_1, tile_1, row0, lane);
      tiles_products<kD>(slope, rows_2, tile_2, row0, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < kN; ++j) {
          const int row = first_row + row0 + i, column = first + lane + 16 * j;
          const int s = kQueries ? row : column, key = kQueries ? column : row;
          const bool seen = s < f.rows && key < visible_keys(f, keys, s);
          const float x = seen ? masked_score<T>(f, score[i][j], b, h, s, key) : minus_infinity();
          const float weight = x == minus_infinity() ? 0.0f : exp2f(x - lse[s]);
          score[i][j] = weight;
          slope[i][j] = weight == 0.0f ? 0.0f : weight * (slope[i][j] - lse[all + s]);
        }
      }
      if constexpr (!kQueries) {
        grad_tiles_add<kD>(sum_2, score, weights, tile_2, row0, lane);
      }
      grad_tiles_add<kD>(sum_1, slope, weights, tile_1, row0, lane);
    }
  }
  if constexpr (kQueries) {
    T* to_q = static_cast<T*>(p.dq) + b * p.dq_batch + head * p.dq_head;
    grad_tiles_store<T, kD>(sum_1, f.scale, to_q, p.dq_row, first_row + row0, f.rows, f.dim);
  } else {
    T* to_k = static_cast<T*>(p.dk) + b * p.dk_batch + head * p.dk_head;
    T* to_v = static_cast<T*>(p.dv) + b * p.dv_batch + head * p.dv_head;
    grad_tiles_store<T, kD>(sum_1, f.scale, to_k, p.dk_row, first_row + row0, f.keys, f.dim);
    grad_tiles_store<T, kD>(sum_2, 1.0f, to_v, p.dv_row, first_row + row0, f.keys, f.dim);
  }
}

}  // namespace rm::cuda_ops
