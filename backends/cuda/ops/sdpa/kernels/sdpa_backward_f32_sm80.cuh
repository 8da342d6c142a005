// The gradient of float32 attention by tensor cores (see sdpa_warp_f32_sm80.cuh). As on Hopper a
// block keeps 128 rows of one side, 16 a warp, and goes through tiles of 32 of the other, the next
// one on its way meanwhile; dq in one launch, dk and dv in another, each sum in a fixed order.
// D <= 128. Bound: tensor cores.
#pragma once

#include "sdpa/kernels/sdpa_backward_statistics_any.cuh"
#include "sdpa/kernels/sdpa_warp_f32_sm80.cuh"

namespace rm::cuda_ops {

template <int kHeadDim>
struct GradF32Shape {
  static constexpr int kD = kHeadDim, kRows = 128, kThreads = 256, kTile = 32;
  static constexpr int kPitch = kD + 4, kStage = 2 * kTile * kPitch;  // floats
  static constexpr int kMemory = 4 * (2 * kRows * kPitch + 2 * kStage);
};

/// A warp's 16 rows of sums, of which a lane holds neighbouring columns of two.
template <int kD>
__device__ __forceinline__ void grad_f32_store(const float (&sum)[kD / 8][4], float scale,
                                               float* to, std::int64_t pitch, int row0, int rows,
                                               int dim) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = row0 + lane / 4 + half * 8;
    if (row >= rows) continue;
#pragma unroll
    for (int d = 0; d < kD / 8; ++d) {
      const int column = d * 8 + lane % 4 * 2;
      if (column >= dim) continue;
      to[row * pitch + column] = sum[d][2 * half] * scale;
      to[row * pitch + column + 1] = sum[d][2 * half + 1] * scale;
    }
  }
}

/// kQueries: dq of 128 query rows, or dk and dv of 128 key rows.
template <int kD, bool kQueries>
__global__ void __launch_bounds__(256, kD == 64 ? 2 : 1) sdpa_backward_f32(const SdpaGradArgs p) {
  using Shape = GradF32Shape<kD>;
  constexpr int kPitch = Shape::kPitch, kTile = Shape::kTile, kRows = Shape::kRows, kN = kTile / 8;
  extern __shared__ __align__(16) float memory_4[];
  const SdpaArgs& f = p.f;
  const std::uint32_t rows_1 = shared_address(memory_4), rows_2 = rows_1 + kRows * kPitch * 4;
  const int heads = kQueries ? f.heads : f.groups, b = blockIdx.y / heads,
            head = blockIdx.y % heads, keys = keys_of(f, b);
  const int first_row = (kQueries ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * kRows;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = first_row + warp * 16;
  const int padded = grad_padded(f.rows);
  const std::int64_t all = static_cast<std::int64_t>(f.batch) * f.heads * padded;
  const auto copy = [&](auto count, std::uint32_t to, bool queries, int h, int first) {
    constexpr int kCount = decltype(count)::value, kBytes = kCount * kPitch * 4;
    const auto part = [&](std::uint32_t at, const void* base, std::int64_t offset,
                          std::int64_t pitch, int rows) {
      f32_copy<kD, kCount, Shape::kThreads>(
          at, static_cast<const float*>(base) + offset + first * pitch, pitch, rows - first, f.dim);
    };
    if (queries) {
      part(to, f.q, b * f.q_batch + h * f.q_head, f.q_row, f.rows);
      part(to + kBytes, p.d_o, b * p.d_o_batch + h * p.d_o_head, p.d_o_row, f.rows);
    } else {
      const int g = kQueries ? h / f.ratio : h;
      part(to, f.k, b * f.k_batch + g * f.k_head, f.k_row, keys);
      part(to + kBytes, f.v, b * f.v_batch + g * f.v_head, f.v_row, keys);
    }
  };
  int from = 0, tiles = 0;  // of columns that some row sees
  if constexpr (kQueries) {
    tiles = (visible_keys(f, keys, min(f.rows, first_row + kRows) - 1) + kTile - 1) / kTile;
  } else if (first_row < keys) {
    const std::int64_t sees = f.causal ? first_row - f.causal_offset : 0;
    from = static_cast<int>(sees < 0 ? 0 : sees < f.rows ? sees : f.rows) / kTile;
    tiles = (f.rows + kTile - 1) / kTile - from;
  }
  const int total = tiles * (kQueries ? 1 : f.ratio);
  const auto ask = [&](int i) {
    if (i < total) {
      const int h = kQueries ? head : head * f.ratio + i / tiles;
      copy(std::integral_constant<int, kTile>{},
           rows_1 + (2 * kRows * kPitch + i % 2 * Shape::kStage) * 4, !kQueries, h,
           (from + i % tiles) * kTile);
    }
    copy_group_end();
  };
  copy(std::integral_constant<int, kRows>{}, rows_1, kQueries, head, first_row);
  ask(0);
  float sum_1[kD / 8][4] = {}, sum_2[kQueries ? 1 : kD / 8][4] = {};
  float row_lse[2] = {}, row_delta[2] = {};
  if constexpr (kQueries) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + lane / 4 + half * 8;
      const std::int64_t at = (static_cast<std::int64_t>(b) * f.heads + head) * padded + row;
      row_lse[half] = row < f.rows ? p.delta[at] : __int_as_float(0x7f800000);
      row_delta[half] = row < f.rows ? p.delta[all + at] : 0.0f;
    }
  }
  const float scale = f.scale * kLog2E;
  for (int i = 0; i < total; ++i) {
    copy_groups_wait<0>();
    __syncthreads();  // this tile is there; the one before is no longer read
    ask(i + 1);
    const int h = kQueries ? head : head * f.ratio + i / tiles, first = (from + i % tiles) * kTile;
    const int last_query = min(f.rows, (kQueries ? row0 + 16 : first + kTile)) - 1;
    if ((kQueries ? first : row0) >= visible_keys(f, keys, last_query)) continue;
    const float* tile = memory_4 + 2 * kRows * kPitch + i % 2 * Shape::kStage;
    const std::uint32_t tile_1 = shared_address(tile), tile_2 = tile_1 + kTile * kPitch * 4;
    float score[kN][4], slope[kN][4];
    f32_products<kD, kTile>(score, rows_1 + warp * 16 * kPitch * 4, tile_1);
    f32_products<kD, kTile>(slope, rows_2 + warp * 16 * kPitch * 4, tile_2);
    const bool all_seen =
        f.mask == nullptr && (kQueries ? first + kTile <= visible_keys(f, keys, row0)
                                       : row0 + 16 <= visible_keys(f, keys, first));
    const float* lse = p.delta + (static_cast<std::int64_t>(b) * f.heads + h) * padded + first;
#pragma unroll
    for (int n = 0; n < kN; ++n) {
      float2 column_lse{}, column_delta{};
      if constexpr (!kQueries) {
        column_lse = *reinterpret_cast<const float2*>(lse + n * 8 + lane % 4 * 2);
        column_delta = *reinterpret_cast<const float2*>(lse + all + n * 8 + lane % 4 * 2);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float base = kQueries ? row_lse[j / 2]
                           : j % 2  ? column_lse.y
                                    : column_lse.x,
                    mean = kQueries ? row_delta[j / 2]
                           : j % 2  ? column_delta.y
                                    : column_delta.x;
        float weight;
        if (all_seen) {
          weight = power_of_2(fmaf(score[n][j], scale, -base));
        } else {
          const int row = row0 + lane / 4 + j / 2 * 8,
                    column = first + n * 8 + lane % 4 * 2 + j % 2;
          const int s = kQueries ? row : column, key = kQueries ? column : row;
          const bool seen = s < f.rows && key < visible_keys(f, keys, s);
          const float x =
              seen ? masked_score<float>(f, score[n][j], b, h, s, key) : minus_infinity();
          weight = x == minus_infinity() ? 0.0f : power_of_2(x - base);
        }
        score[n][j] = weight;
        slope[n][j] = weight == 0.0f ? 0.0f : weight * (slope[n][j] - mean);
      }
    }
    if constexpr (!kQueries) f32_add<kD, kTile>(sum_2, score, tile + kTile * kPitch);
    f32_add<kD, kTile>(sum_1, slope, tile);
  }
  copy_groups_wait<0>();
  if constexpr (kQueries) {
    float* dq = static_cast<float*>(p.dq) + b * p.dq_batch + head * p.dq_head;
    grad_f32_store<kD>(sum_1, f.scale, dq, p.dq_row, row0, f.rows, f.dim);
  } else {
    float* dk = static_cast<float*>(p.dk) + b * p.dk_batch + head * p.dk_head;
    float* dv = static_cast<float*>(p.dv) + b * p.dv_batch + head * p.dv_head;
    grad_f32_store<kD>(sum_1, f.scale, dk, p.dk_row, row0, f.keys, f.dim);
    grad_f32_store<kD>(sum_2, 1.0f, dv, p.dv_row, row0, f.keys, f.dim);
  }
}

}  // namespace rm::cuda_ops
