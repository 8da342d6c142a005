// Many query rows in float32, by multiply-adds: a block of 16 x 16 threads takes 128 rows and tiles
// of 128 keys, a thread every 16th row and key of them, so that 8 x 8 products need 16 operands.
// Keys and values are copied while the other ones are used; the weights take the keys' place where
// shared memory does not hold both. Bound: multiply-adds.
#pragma once

#include "sdpa/kernels/sdpa_tiles_any.cuh"

namespace rm::cuda_ops {

template <int kHeadDim>
struct PrefillF32Shape {
  static constexpr int kD = kHeadDim, kRows = 128, kThreads = 256, kPitch = kD + 4;
  static constexpr int kWeights = kRows + 16;  // a row of weights: neighbouring ones in other banks
  static constexpr bool kAlias = kD > 64;
  static constexpr int kTile = kRows * kPitch, kAll = kRows * kWeights;
  static constexpr int kMemory =
      4 * (kTile + (kAlias ? (kTile > kAll ? kTile : kAll) : kTile + kAll) + kRows * kD);
};

/// 128 rows of a [*, dim] matrix of 16-byte aligned rows; zeros beyond `valid` rows and `dim`.
template <int kD>
__device__ __forceinline__ void prefill_f32_copy(float* to, int to_pitch, const float* from,
                                                 std::int64_t pitch, int valid, int dim) {
  const std::uint32_t at = shared_address(to);
#pragma unroll 8
  for (int i = threadIdx.x; i < 128 * kD / 4; i += 256) {
    const int row = i / (kD / 4), d = i % (kD / 4) * 4;
    const bool inside = row < valid && d < dim;
    copy_16_async(at + (row * to_pitch + d) * 4, inside ? from + row * pitch + d : from, inside);
  }
  copy_group_end();
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) sdpa_prefill_f32(const SdpaArgs p) {
  constexpr int kD = Shape::kD, kPitch = Shape::kPitch, kRows = Shape::kRows, kPer = 8,
                kColumns = kD / 64;  // of o: 4 neighbours in each 64
  extern __shared__ __align__(16) float memory_4[];
  float *q_tile = memory_4, *v_tile = q_tile + Shape::kTile, *k_tile = v_tile + kRows * kD,
        *weights = Shape::kAlias ? k_tile : k_tile + Shape::kTile;
  const int b = blockIdx.y / p.heads, h = blockIdx.y % p.heads, g = h / p.ratio;
  const int s0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kRows;  // longest first
  const int row0 = threadIdx.x / 16, lane = threadIdx.x % 16;
  const int keys = keys_of(p, b), last = visible_keys(p, keys, min(p.rows, s0 + kRows) - 1);
  const float* k = static_cast<const float*>(p.k) + b * p.k_batch + g * p.k_head;
  const float* v = static_cast<const float*>(p.v) + b * p.v_batch + g * p.v_head;
  const auto ask_k = [&](int first) {
    prefill_f32_copy<kD>(k_tile, kPitch, k + first * p.k_row, p.k_row,
                         first < last ? keys - first : 0, p.dim);
  };
  const auto ask_v = [&](int first) {
    prefill_f32_copy<kD>(v_tile, kD, v + first * p.v_row, p.v_row, first < last ? keys - first : 0,
                         p.dim);
  };
  prefill_f32_copy<kD>(q_tile, kPitch,
                       static_cast<const float*>(p.q) + b * p.q_batch + h * p.q_head + s0 * p.q_row,
                       p.q_row, p.rows - s0, p.dim);
  ask_k(0);
  ask_v(0);
  float sum[kPer][kColumns][4] = {}, top[kPer], total[kPer] = {};
  int seen[kPer];
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int s = s0 + row0 + 16 * i;
    top[i] = minus_infinity(), seen[i] = s < p.rows ? visible_keys(p, keys, s) : 0;
  }
  for (int first = 0; first < last; first += kRows) {
    copy_groups_wait<1>();  // all but the values
    __syncthreads();
    float score[kPer][kPer] = {};
#pragma unroll 2
    for (int d = 0; d < kD; d += 4) {
      float4 x[kPer], y[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        x[i] = *reinterpret_cast<const float4*>(q_tile + (row0 + 16 * i) * kPitch + d);
        y[i] = *reinterpret_cast<const float4*>(k_tile + (lane + 16 * i) * kPitch + d);
      }
      add_products(score, x, y);
    }
    copy_groups_wait<0>();
    __syncthreads();  // the values are there; the keys are no longer read
    if constexpr (!Shape::kAlias) ask_k(first + kRows);
#pragma unroll
    for (int i = 0; i < kPer; ++i) {
      float high = top[i];
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const int key = first + lane + 16 * j;
        score[i][j] = key < seen[i]
                          ? masked_score<float>(p, score[i][j], b, h, s0 + row0 + 16 * i, key)
                          : minus_infinity();
        high = fmaxf(high, score[i][j]);  // NaN is no maximum
      }
      high = lanes_16_max(high);
      const float base = high == minus_infinity() ? 0.0f : high, keep = power_of_2(top[i] - base);
      top[i] = high, total[i] *= keep;
#pragma unroll
      for (int j = 0; j < kPer; ++j) {
        const float weight = power_of_2(score[i][j] - base);
        total[i] += weight;
        weights[(row0 + 16 * i) * Shape::kWeights + lane + 16 * j] = weight;
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][c][j] *= keep;
      }
    }
    __syncwarp();  // a warp reads the weights of its own rows
#pragma unroll 2
    for (int key = 0; key < kRows; key += 4) {
      float4 x[kPer];
#pragma unroll
      for (int i = 0; i < kPer; ++i) {
        x[i] = *reinterpret_cast<const float4*>(weights + (row0 + 16 * i) * Shape::kWeights + key);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const float4 y =
              *reinterpret_cast<const float4*>(v_tile + (key + j) * kD + c * 64 + lane * 4);
#pragma unroll
          for (int i = 0; i < kPer; ++i) {
            const float weight = j == 0 ? x[i].x : j == 1 ? x[i].y : j == 2 ? x[i].z : x[i].w;
            sum[i][c][0] = fmaf(weight, y.x, sum[i][c][0]);
            sum[i][c][1] = fmaf(weight, y.y, sum[i][c][1]);
            sum[i][c][2] = fmaf(weight, y.z, sum[i][c][2]);
            sum[i][c][3] = fmaf(weight, y.w, sum[i][c][3]);
          }
        }
      }
    }
    __syncthreads();  // the values are no longer read
    if constexpr (Shape::kAlias) ask_k(first + kRows);
    ask_v(first + kRows);
  }
  copy_groups_wait<0>();
#pragma unroll
  for (int i = 0; i < kPer; ++i) {
    const int s = s0 + row0 + 16 * i;
#pragma unroll
    for (int n = 8; n > 0; n >>= 1) total[i] += __shfl_xor_sync(0xffffffffu, total[i], n);
    if (s >= p.rows) continue;
    const float scale = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
    float* o = static_cast<float*>(p.o) + b * p.o_batch + h * p.o_head + s * p.o_row;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = c * 64 + lane * 4 + j;
        if (column < p.dim) o[column] = sum[i][c][j] * scale;
      }
    }
    if (p.lse && lane == 0) {
      p.lse[(static_cast<std::int64_t>(b) * p.heads + h) * p.rows + s] =
          top[i] / kLog2E + logf(total[i]);
    }
  }
}

}  // namespace rm::cuda_ops
