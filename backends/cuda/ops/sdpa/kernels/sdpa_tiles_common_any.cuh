// What attention by multiply-adds and its gradient share: a block of 16 x 16 threads has 64 rows,
// a thread 4 of them and of kD columns 4 neighbours in each 64. Tiles are of floats, in shared
// memory, their rows padded where a thread reads every 16th, so that neighbours lie in other banks.
#pragma once

#include "sdpa/kernels/sdpa_common.cuh"

namespace rm::cuda_ops {

inline constexpr int kTilesRows = 64, kTilesThreads = 256;

/// kRows rows of a [*, dim] matrix as floats; zeros beyond `valid` rows and `dim`. vectors: rows of
/// floats are 16-byte aligned, and are copied without waiting for them.
template <class T, int kD, int kPitch, int kRows>
__device__ __forceinline__ void tiles_load(float* to, const T* from, std::int64_t pitch, int valid,
                                           int dim, bool vectors) {
  if constexpr (std::is_same_v<T, float>) {
    if (vectors) {
      const std::uint32_t at = shared_address(to);
#pragma unroll 8
      for (int i = threadIdx.x; i < kRows * kD / 4; i += kTilesThreads) {
        const int row = i / (kD / 4), d = i % (kD / 4) * 4;
        const bool inside = row < valid && d < dim;
        copy_16_async(at + (row * kPitch + d) * 4, inside ? from + row * pitch + d : from, inside);
      }
      return;
    }
  }
#pragma unroll 8
  for (int i = threadIdx.x; i < kRows * kD; i += kTilesThreads) {
    const int row = i / kD, d = i % kD;
    to[row * kPitch + d] = row < valid && d < dim ? to_float(from[row * pitch + d]) : 0.0f;
  }
}

/// sum[i][j] += x[i] y[j]: one multiply-add of each product after the other, so that none waits.
template <int kM, int kN>
__device__ __forceinline__ void add_products(float (&sum)[kM][kN], const float4 (&x)[kM],
                                             const float4 (&y)[kN]) {
  const auto part = [](const float4& v, int c) {
    return c == 0 ? v.x : c == 1 ? v.y : c == 2 ? v.z : v.w;
  };
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int j = 0; j < kN; ++j) sum[i][j] = fmaf(part(x[i], c), part(y[j], c), sum[i][j]);
    }
  }
}

__device__ __forceinline__ float lanes_16_max(float x) {
#pragma unroll
  for (int k = 8; k > 0; k >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, k));
  return x;
}

/// out = rows tile^T: rows row0 .. row0 + 3, columns lane + 16 j.
template <int kD, int kN>
__device__ __forceinline__ void tiles_products(float (&out)[4][kN], const float* rows,
                                               const float* tile, int row0, int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) out[i][j] = 0.0f;
  }
#pragma unroll 4
  for (int d = 0; d < kD; d += 4) {
    float4 x[4], y[kN];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = *reinterpret_cast<const float4*>(rows + (row0 + i) * (kD + 4) + d);
    }
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      y[j] = *reinterpret_cast<const float4*>(tile + (lane + 16 * j) * (kD + 4) + d);
    }
    add_products(out, x, y);
  }
}

/// sum += weights tile. A thread's rows of weights lie kWeights floats apart from `weights` on.
template <int kD, int kRows, int kWeights, int kPitch>
__device__ __forceinline__ void tiles_add(float (&sum)[4][kD / 64][4], const float* weights,
                                          const float* tile, int lane) {
#pragma unroll 2
  for (int n = 0; n < kRows; n += 4) {
    float4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = *reinterpret_cast<const float4*>(weights + i * kWeights + n);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int c = 0; c < kD / 64; ++c) {
        const float4 y =
            *reinterpret_cast<const float4*>(tile + (n + j) * kPitch + c * 64 + lane * 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float weight = j == 0 ? x[i].x : j == 1 ? x[i].y : j == 2 ? x[i].z : x[i].w;
          sum[i][c][0] += weight * y.x, sum[i][c][1] += weight * y.y;
          sum[i][c][2] += weight * y.z, sum[i][c][3] += weight * y.w;
        }
      }
    }
  }
}

/// A row of `dim` values from a thread's sums of it.
template <class T, int kD>
__device__ __forceinline__ void tiles_store(const float (&sum)[kD / 64][4], float scale, T* to,
                                            int dim) {
#pragma unroll
  for (int c = 0; c < kD / 64; ++c) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = c * 64 + static_cast<int>(threadIdx.x % 16) * 4 + j;
      if (column < dim) to[column] = from_float<T>(sum[c][j] * scale);
    }
  }
}

}  // namespace rm::cuda_ops
