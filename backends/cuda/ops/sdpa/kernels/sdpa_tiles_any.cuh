// Attention by plain multiply-adds for what tensor cores would round or cannot read: float32, odd
// head dims, unaligned rows. A block of 16 x 16 threads takes 64 query rows; a thread 4 of them,
// and every 16th key of a tile of 64. The weights take the keys' place in shared memory. D <= 256.
// Bound: multiply-adds.
#pragma once

#include "sdpa/kernels/sdpa_tiles_common_any.cuh"

namespace rm::cuda_ops {

inline constexpr int kTilesWeights = kTilesRows + 4;
__host__ __device__ constexpr int tiles_memory(int dim) {
  return kTilesRows * (2 * (dim + 4) + dim) * 4;
}

template <class T, int kD>
__global__ void __launch_bounds__(kTilesThreads, kD > 128 ? 1 : 2) sdpa_tiles(const SdpaArgs p) {
  constexpr int kPitch = kD + 4, kColumns = kD / 64;  // of o: 4 neighbours in each 64
  extern __shared__ __align__(16) float memory_4[];
  float *q_tile = memory_4, *k_tile = q_tile + kTilesRows * kPitch,
        *v_tile = k_tile + kTilesRows * kPitch, *weights = k_tile;
  const int b = blockIdx.y / p.heads, h = blockIdx.y % p.heads, g = h / p.ratio;
  const int s0 = static_cast<int>(gridDim.x - 1 - blockIdx.x) * kTilesRows;  // longest first
  const int row0 = threadIdx.x / 16 * 4, lane = threadIdx.x % 16;
  const int keys = keys_of(p, b), last = visible_keys(p, keys, min(p.rows, s0 + kTilesRows) - 1);
  const T* k = static_cast<const T*>(p.k) + b * p.k_batch + g * p.k_head;
  const T* v = static_cast<const T*>(p.v) + b * p.v_batch + g * p.v_head;
  const T* q = static_cast<const T*>(p.q) + b * p.q_batch + h * p.q_head + s0 * p.q_row;
  tiles_load<T, kD, kPitch, kTilesRows>(q_tile, q, p.q_row, p.rows - s0, p.dim, false);
  float sum[4][kColumns][4] = {}, top[4], total[4] = {};
  int seen[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    top[i] = minus_infinity();
    seen[i] = s0 + row0 + i < p.rows ? visible_keys(p, keys, s0 + row0 + i) : 0;
  }
  for (int first = 0; first < last; first += kTilesRows) {
    __syncthreads();  // the tiles before are no longer read
    tiles_load<T, kD, kPitch, kTilesRows>(k_tile, k + first * p.k_row, p.k_row, keys - first, p.dim,
                                          false);
    tiles_load<T, kD, kD, kTilesRows>(v_tile, v + first * p.v_row, p.v_row, keys - first, p.dim,
                                      false);
    __syncthreads();
    float score[4][4];
    tiles_products<kD>(score, q_tile, k_tile, row0, lane);
    __syncthreads();  // the keys are no longer read
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = first + lane + 16 * j;
        score[i][j] = key < seen[i] ? masked_score<T>(p, score[i][j], b, h, s0 + row0 + i, key)
                                    : minus_infinity();
      }
      const float high = lanes_16_max(fmaxf(fmaxf(score[i][0], score[i][1]),  // NaN is no maximum
                                            fmaxf(score[i][2], score[i][3])));
      const float above = fmaxf(top[i], high), base = above == minus_infinity() ? 0.0f : above;
      const float keep = exp2f(top[i] - base);
      top[i] = above, total[i] *= keep;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float weight = exp2f(score[i][j] - base);
        total[i] += weight;
        weights[(row0 + i) * kTilesWeights + lane + 16 * j] = weight;
      }
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][c][j] *= keep;
      }
    }
    __syncwarp();  // a warp reads the weights of its own rows
    tiles_add<kD, kTilesRows, kTilesWeights, kD>(sum, weights + row0 * kTilesWeights, v_tile, lane);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int s = s0 + row0 + i;
#pragma unroll
    for (int n = 8; n > 0; n >>= 1) total[i] += __shfl_xor_sync(0xffffffffu, total[i], n);
    if (s >= p.rows) continue;
    const float scale = total[i] == 0.0f ? 0.0f : 1.0f / total[i];
    T* o = static_cast<T*>(p.o) + b * p.o_batch + h * p.o_head + s * p.o_row;
    tiles_store<T, kD>(sum[i], scale, o, p.dim);
    if (p.lse && lane == 0) {
      p.lse[(static_cast<std::int64_t>(b) * p.heads + h) * p.rows + s] =
          top[i] / kLog2E + logf(total[i]);
    }
  }
}

}  // namespace rm::cuda_ops
