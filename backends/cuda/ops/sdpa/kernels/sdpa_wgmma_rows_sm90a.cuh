// What one warpgroup of sdpa_wgmma has of its 64 rows, and what it does with tiles of keys and
// values: registers of an accumulator, of which a thread holds columns of rows g and g + 8.
#pragma once

#include "sdpa/kernels/sdpa_common.cuh"
#include "sdpa/kernels/sdpa_ptx_sm90a.cuh"

namespace rm::cuda_ops {

/// A block's rows of a head, and how many tiles of keys they see.
struct WgmmaTile {
  int b, h, s0, keys, tiles;
};

/// The rows of one warpgroup: sums, maxima, totals.
template <class T, int kD, int kKeys>
struct WgmmaRows {
  float sum[kD / 2], score[kKeys / 2], top[2], total[2];
  std::uint32_t weight[kKeys / 4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) sum[i] = 0.0f;
    top[0] = top[1] = minus_infinity(), total[0] = total[1] = 0.0f;
  }
  /// Starts score = q k^T; rows_step: bytes from 64 columns of q to the next.
  __device__ __forceinline__ void ask_scores(std::uint32_t q, int rows_step, std::uint32_t k) {
    const std::uint64_t a = wgmma_descriptor(q), b = wgmma_descriptor(k);
#pragma unroll
    for (int c = 0; c < kD / 64; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        wgmma_ss<T, kKeys>(score, a + (c * rows_step >> 4) + 2 * i,
                           b + (c * kKeys * 128 >> 4) + 2 * i, c + i);
      }
    }
    wgmma_commit();
  }
  /// Starts sum += weight v.
  __device__ __forceinline__ void ask_sums(std::uint32_t v) {
    const std::uint64_t b = wgmma_descriptor(v, kKeys * 128);
#pragma unroll
    for (int i = 0; i < kKeys / 16; ++i) wgmma_rs<T, kD>(sum, weight + 4 * i, b + i * (2048 >> 4));
    wgmma_commit();
  }
  /// Keys this row does not see weigh nothing: `seen` of rows g and g + 8, from the tile's start.
  __device__ __forceinline__ void hide(const int (&seen)[2]) {
    const int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < kKeys / 2; ++i) {
      if (i / 4 * 8 + i % 2 >= seen[i / 2 % 2] - column) score[i] = minus_infinity();
    }
  }
  /// Scores become weights, of powers of two above `top`; keep: what the sums so far are to be
  /// multiplied by. `top` follows the maximum only when that is 2^8 above, so that it rarely moves.
  __device__ __forceinline__ void soften(float scale, float (&keep)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float high = fmaxf(score[2 * half], score[2 * half + 1]);
#pragma unroll
      for (int i = 4; i < kKeys / 2; i += 4) {
        high = fmaxf(high, fmaxf(score[i + 2 * half], score[i + 2 * half + 1]));
      }
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2)) * scale;
      // No branches: with products on their way the compiler would wait for them first.
      const float rise = high > top[half] + 8.0f ? high : top[half];
      const float base = rise == minus_infinity() ? 0.0f : rise;
      keep[half] = power_of_2(top[half] - base), top[half] = rise;
      float part[2] = {0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < kKeys / 2; i += 4) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          float& x = score[i + 2 * half + j];
          x = power_of_2(fmaf(x, scale, -base));
          part[j] += x;
        }
      }
      total[half] = total[half] * keep[half] + (part[0] + part[1]);
    }
  }
  __device__ __forceinline__ void pack_weights() {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weight[i] = pack_pair<T>(score[2 * i], score[2 * i + 1]);
      // Behind the next fence this would make the compiler start products anew.
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) asm volatile("" : "+r"(weight[i])::"memory");
  }
  __device__ __forceinline__ void scale_sums(const float (&keep)[2]) {
    if (!__any_sync(0xffffffffu, keep[0] != 1.0f || keep[1] != 1.0f)) return;
#pragma unroll
    for (int i = 0; i < kD / 2; ++i) sum[i] *= keep[i / 2 % 2];
  }
  /// Adds up what warpgroups have of the same rows, in their order, in the first one. `memory` may
  /// be what tiles were in.
  template <class Shape>
  __device__ __forceinline__ void join(float* memory, int group) {
    const int thread = threadIdx.x % 128;
    const auto at = [&](int of, int i) -> float& {
      return memory[((of - 1) * Shape::kJoinFloats + i) * 128 + thread];
    };
    named_barrier(5, Shape::kThreads - 128);  // tiles are no longer read
    if (group > 0) {
#pragma unroll
      for (int i = 0; i < kD / 2; ++i) at(group, i) = sum[i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        at(group, kD / 2 + half) = top[half], at(group, kD / 2 + 2 + half) = total[half];
      }
    }
    named_barrier(5, Shape::kThreads - 128);
    if (group > 0) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float high = top[half];
#pragma unroll
      for (int g = 1; g < Shape::kWarpgroups; ++g) high = fmaxf(high, at(g, kD / 2 + half));
      const float base = high == minus_infinity() ? 0.0f : high;
      const float keep = power_of_2(top[half] - base);
      total[half] *= keep, top[half] = high;
#pragma unroll
      for (int i = 2 * half; i < kD / 2; i += 4) sum[i] *= keep, sum[i + 1] *= keep;
#pragma unroll
      for (int g = 1; g < Shape::kWarpgroups; ++g) {
        const float weight_of = power_of_2(at(g, kD / 2 + half) - base);
        total[half] += at(g, kD / 2 + 2 + half) * weight_of;
#pragma unroll
        for (int i = 2 * half; i < kD / 2; i += 4) {
          sum[i] += at(g, i) * weight_of, sum[i + 1] += at(g, i + 1) * weight_of;
        }
      }
    }
  }
  /// Rows s and s + 8 of o, and their log-sum-exp.
  __device__ __forceinline__ void store(const SdpaArgs& p, const WgmmaTile& t, int s) {
    float scale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float all = total[half];
      all += __shfl_xor_sync(0xffffffffu, all, 1);
      all += __shfl_xor_sync(0xffffffffu, all, 2);
      scale[half] = all == 0.0f ? 0.0f : 1.0f / all;
      const int row = s + 8 * half;
      if (p.lse && threadIdx.x % 4 == 0 && row < p.rows) {
        p.lse[(static_cast<std::int64_t>(t.b) * p.heads + t.h) * p.rows + row] =
            top[half] / kLog2E + logf(all);
      }
    }
    T* o = static_cast<T*>(p.o) + t.b * p.o_batch + t.h * p.o_head;
    store_rows<T, kD>(sum, scale, o, p.o_row, s, p.rows, p.dim);
  }
};

}  // namespace rm::cuda_ops
