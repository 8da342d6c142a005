// One warp's work on tiles of keys by tensor cores: scores of kM * 16 rows against kKeys keys, the
// running softmax, and the sums. Tiles are in shared memory, rows of kD * 2 bytes, swizzled.
#pragma once

#include "sdpa/kernels/sdpa_common.cuh"

namespace rm::cuda_ops {

template <class T, int kD, int kM, int kKeys>
struct SdpaWarp {
  float sum[kM][kD / 8][4];
  float top[kM][2], total[kM][2];  // of rows g and g + 8; `total` is this lane's own share

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      top[m][0] = top[m][1] = minus_infinity();
      total[m][0] = total[m][1] = 0.0f;
#pragma unroll
      for (int d = 0; d < kD / 8; ++d) {
        sum[m][d][0] = sum[m][d][1] = sum[m][d][2] = sum[m][d][3] = 0.0f;
      }
    }
  }

  /// score = q k^T; q_fragment(m, step, out) gives the rows' 16 columns of a step.
  template <class Query>
  __device__ __forceinline__ void scores(std::uint32_t k_tile, const Query& q_fragment,
                                         float (&score)[kM][kKeys / 8][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) {
        score[m][n][0] = score[m][n][1] = score[m][n][2] = score[m][n][3] = 0.0f;
      }
    }
#pragma unroll
    for (int step = 0; step < kD / 16; ++step) {
      std::uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) q_fragment(m, step, a[m]);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        std::uint32_t b[4];
        const int key = n * 16 + lane / 16 * 8 + lane % 8, piece = step * 2 + lane / 8 % 2;
        load_matrix_x4(b, k_tile + swizzled<kD * 2>(key, piece));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_16816<T>(score[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          mma_16816<T>(score[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
    }
  }

  /// Scores times `scale` (positive) become weights; the sums so far are scaled down where a row's
  /// maximum rose. A NaN is no maximum, but its weight and with it the row are NaN.
  __device__ __forceinline__ void soften(float (&score)[kM][kKeys / 8][4], float scale) {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float high = score[m][0][2 * half];
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          high = fmaxf(high, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
        }
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
        high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
        high = fmaxf(top[m][half], high * scale);
        const float base = high == minus_infinity() ? 0.0f : high;
        const float keep = power_of_2(top[m][half] - base);
        top[m][half] = high;
        float weight = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            float& x = score[m][n][2 * half + j];
            x = power_of_2(x * scale - base);
            weight += x;
          }
        }
        total[m][half] = total[m][half] * keep + weight;
        if (__any_sync(0xffffffffu, keep != 1.0f)) {
#pragma unroll
          for (int d = 0; d < kD / 8; ++d)
            sum[m][d][2 * half] *= keep, sum[m][d][2 * half + 1] *= keep;
        }
      }
    }
  }

  /// sum += weights v.
  __device__ __forceinline__ void add(std::uint32_t v_tile,
                                      const float (&score)[kM][kKeys / 8][4]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      std::uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        a[m][0] = pack_pair<T>(score[m][2 * n][0], score[m][2 * n][1]);
        a[m][1] = pack_pair<T>(score[m][2 * n][2], score[m][2 * n][3]);
        a[m][2] = pack_pair<T>(score[m][2 * n + 1][0], score[m][2 * n + 1][1]);
        a[m][3] = pack_pair<T>(score[m][2 * n + 1][2], score[m][2 * n + 1][3]);
      }
#pragma unroll
      for (int d = 0; d < kD / 16; ++d) {
        std::uint32_t b[4];
        const int key = n * 16 + lane / 8 % 2 * 8 + lane % 8, piece = d * 2 + lane / 16;
        load_matrix_x4_transposed(b, v_tile + swizzled<kD * 2>(key, piece));
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_16816<T>(sum[m][2 * d], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
          mma_16816<T>(sum[m][2 * d + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
        }
      }
    }
  }

  /// Afterwards every lane of a row has the row's total weight.
  __device__ __forceinline__ void finish_totals() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& t = total[m][half];
        t += __shfl_xor_sync(0xffffffffu, t, 1);
        t += __shfl_xor_sync(0xffffffffu, t, 2);
      }
    }
  }
};

/// kRows rows of a [*, dim] matrix to a swizzled tile; zeros beyond `valid` rows and `dim`.
template <class T, int kD, int kRows, int kThreads>
__device__ __forceinline__ void copy_tile(std::uint32_t tile, const T* from, std::int64_t pitch,
                                          int valid, int dim, int thread) {
  constexpr int kPieces = kD / 8;
#pragma unroll
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int at = i * kThreads + thread, row = at / kPieces, piece = at % kPieces;
    const bool inside = row < valid && piece * 8 < dim;
    copy_16_async(tile + swizzled<kD * 2>(row, piece),
                  inside ? from + row * pitch + piece * 8 : from, inside);
  }
}

}  // namespace rm::cuda_ops
