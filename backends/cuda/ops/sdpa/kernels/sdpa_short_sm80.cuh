// Up to 128 keys of head dim 64, as short encoders have: a block takes 16 query rows of a head, a
// warp 32 keys. Everything comes straight to registers as the tensor cores' fragments, all at once:
// q and k have their summed axis permuted alike, v its columns, so that a lane loads 16 bytes. The
// warps' sums meet in shared memory. Bound: the latency of one read of the L2 cache, and a launch.
#pragma once

#include "_shim/launch_shim.hpp"
#include "sdpa/kernels/sdpa_common.cuh"

namespace rm::cuda_ops {

inline constexpr int kShortKeys = 128, kShortRows = 16, kShortDim = 64;

/// What a warp leaves of its keys: weighted values, and of each row the maximum and the sum.
struct ShortPart {
  float value[kShortRows][kShortDim + 4];
  float2 sum[kShortRows];
};

/// 16 bytes past the first-level cache, asked for where it stands; zeros where there is no row.
__device__ __forceinline__ uint4 short_load(bool is, const void* from) {
  uint4 v{};
  if (is) {
    asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
  }
  return v;
}

/// A lane's fragments: rows of q lane / 4 and 8 below, keys lane / 4 of eight, values of the keys
/// that a product's lane sums. k and v of keys that no row sees are zeros, whatever lies there.
template <class T>
struct ShortLane {
  uint4 q[2][2], k[4][2], v[2][4];

  __device__ __forceinline__ void load(const SdpaArgs& p, int b, int h, int row0, int key0,
                                       int keys, int lane) {
    const int group = lane / 4, t = lane % 4, g = h / p.ratio;
    const T* q_at = static_cast<const T*>(p.q) + b * p.q_batch + h * p.q_head + t * 8;
    const T* k_at = static_cast<const T*>(p.k) + b * p.k_batch + g * p.k_head + t * 8;
    const T* v_at = static_cast<const T*>(p.v) + b * p.v_batch + g * p.v_head + group * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = row0 + group + i / 2 * 8;
      q[i / 2][i % 2] = short_load(row < p.rows, q_at + row * p.q_row + i % 2 * 32);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = key0 + i / 2 * 8 + group;
      k[i / 2][i % 2] = short_load(key < keys, k_at + key * p.k_row + i % 2 * 32);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int key = key0 + i / 4 * 16 + t * 2 + i % 2 + i / 2 % 2 * 8;
      v[i / 4][i % 4] = short_load(key < keys, v_at + key * p.v_row);
    }
  }
  __device__ __forceinline__ void scores(float (&s)[4][4]) const {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int d = 0; d < 2; ++d) {
        mma_16816<T>(s[n], q[0][d].x, q[1][d].x, q[0][d].y, q[1][d].y, k[n][d].x, k[n][d].y);
        mma_16816<T>(s[n], q[0][d].z, q[1][d].z, q[0][d].w, q[1][d].w, k[n][d].z, k[n][d].w);
      }
    }
  }
  /// o[n][2 i + j]: row lane / 4 + 8 i, column 8 (2 (lane % 4) + j) + n.
  __device__ __forceinline__ void values(const float (&s)[4][4], float (&o)[8][4]) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float(&l)[4] = s[2 * i], (&r)[4] = s[2 * i + 1];
      const std::uint32_t a[] = {pack_pair<T>(l[0], l[1]), pack_pair<T>(l[2], l[3]),
                                 pack_pair<T>(r[0], r[1]), pack_pair<T>(r[2], r[3])};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const auto word = [&](const uint4& x) {
          return n / 2 == 0 ? x.x : n / 2 == 1 ? x.y : n / 2 == 2 ? x.z : x.w;
        };
        const unsigned pick = n % 2 ? 0x7632 : 0x5410;
        mma_16816<T>(o[n], a[0], a[1], a[2], a[3],
                     __byte_perm(word(v[i][0]), word(v[i][1]), pick),
                     __byte_perm(word(v[i][2]), word(v[i][3]), pick));
      }
    }
  }
};

/// Scores become weights below the row's maximum; returns it and their sum.
__device__ __forceinline__ float2 short_soften(float (&s)[4][4], int half) {
  float most = minus_infinity(), sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, s[i / 2][2 * half + i % 2]);
#pragma unroll
  for (int x = 1; x < 4; x *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, x));
  const float from = most == minus_infinity() ? 0.0f : most;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float& v = s[i / 2][2 * half + i % 2];
    v = power_of_2(v - from);
    sum += v;
  }
#pragma unroll
  for (int x = 1; x < 4; x *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, x);
  return {most, sum};
}

template <class T>
__global__ void __launch_bounds__(128) sdpa_short(const __grid_constant__ SdpaArgs p) {
  __shared__ __align__(16) ShortPart part[4];
  overlap_begin(p.q, p.k, p.v, p.o);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, t = lane % 4;
  const int row0 = static_cast<int>(blockIdx.x) * kShortRows, key0 = warp * 32;
  const int b = static_cast<int>(blockIdx.y) / p.heads, h = static_cast<int>(blockIdx.y) % p.heads;
  const int keys = keys_of(p, b);
  ShortLane<T> mine;
  mine.load(p, b, h, row0, key0, keys, lane);
  float mask[2][8] = {};
  if (p.mask && p.keys > 0) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int row = min(row0 + group + i / 8 * 8, p.rows - 1);
      const int key = min(key0 + i % 8 / 2 * 8 + t * 2 + i % 2, p.keys - 1);
      mask[i / 8][i % 8] = mask_at<T>(p, b, h, row, key);
    }
  }
  float s[4][4] = {};
  // A loop of one turn (splits is 1): ptxas would put products in front of the last loads.
#pragma unroll 1
  for (int turn = 0; turn < p.splits; ++turn) mine.scores(s);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = group + half * 8, seen = visible_keys(p, keys, row0 + row);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = s[i / 2][2 * half + i % 2];
      const bool sees = key0 + i / 2 * 8 + t * 2 + i % 2 < seen;
      x = sees ? masked(p, x, mask[half][i]) : minus_infinity();
    }
    const float2 sum = short_soften(s, half);
    if (t == 0) part[warp].sum[row] = sum;
  }
  float o[8][4] = {};
  mine.values(s, o);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int half = i / 4, j = i / 2 % 2, n = i % 2 * 4, at = 2 * half + j;
    *reinterpret_cast<float4*>(&part[warp].value[group + 8 * half][16 * t + 8 * j + n]) =
        make_float4(o[n][at], o[n + 1][at], o[n + 2][at], o[n + 3][at]);
  }
  __syncthreads();
  const int r = threadIdx.x / 8, d = threadIdx.x % 8 * 8, row = row0 + r;
  if (row >= p.rows) return;
  float top = minus_infinity(), all = 0.0f, v[8] = {};
#pragma unroll
  for (int w = 0; w < 4; ++w) top = fmaxf(top, part[w].sum[r].x);
  const float from = top == minus_infinity() ? 0.0f : top;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float by = power_of_2(part[w].sum[r].x - from);
    all += by * part[w].sum[r].y;
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] += by * part[w].value[r][d + i];
  }
  const float by = all == 0.0f ? 0.0f : 1.0f / all;
  T* to = static_cast<T*>(p.o) + b * p.o_batch + h * p.o_head + row * p.o_row + d;
#pragma unroll
  for (float& x : v) x *= by;
  store_vec<T, 8>(to, v);
  if (p.lse && d == 0) {
    const std::int64_t at = (static_cast<std::int64_t>(b) * p.heads + h) * p.rows + row;
    p.lse[at] = top / kLog2E + logf(all);
  }
}

}  // namespace rm::cuda_ops
