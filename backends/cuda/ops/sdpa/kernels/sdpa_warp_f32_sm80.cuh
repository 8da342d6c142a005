// One warp's work on tiles of float32 by tensor cores, as accurate as float32: a value is its upper
// 19 bits and the rest, of which the cores read 11, and of the four products the least is left out
// (2^-21 of a product). The products of upper parts have sums of their own, which say what is
// infinite or NaN; no sum in the cores, which cut off and do not round, is longer than a tile or a
// row. Tiles are in shared memory, their rows kD + 4 floats apart: neighbours lie in other banks.
#pragma once

#include "sdpa/kernels/sdpa_warp_sm80.cuh"

namespace rm::cuda_ops {

/// c[16x8] += a[16x8] b[8x8]; the lower 13 bits of a and b are not read.
__device__ __forceinline__ void mma_1688_tf32(float (&c)[4], const std::uint32_t (&a)[4],
                                              std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// What mma_1688_tf32 does not read of x. NaN of an infinite x.
__device__ __forceinline__ std::uint32_t lower_part(std::uint32_t x) {
  return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & 0xffffe000u));
}

/// Sums of 16 x 32 products: of upper parts, and of an upper and a lower one.
struct F32Products {
  float upper[4][4], mixed[4][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) upper[n][i] = mixed[n][i] = 0.0f;
    }
  }
  /// b: two values of each 8 columns. Sums that are added to twice are 4 products apart.
  __device__ __forceinline__ void add(const std::uint32_t (&a)[4], const std::uint32_t (&b)[4][2]) {
    std::uint32_t a_lower[4], b_lower[4][2];
#pragma unroll
    for (int i = 0; i < 4; ++i) a_lower[i] = lower_part(a[i]);
#pragma unroll
    for (int n = 0; n < 4; ++n) mma_1688_tf32(upper[n], a, b[n][0], b[n][1]);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      b_lower[n][0] = lower_part(b[n][0]), b_lower[n][1] = lower_part(b[n][1]);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) mma_1688_tf32(mixed[n], a_lower, b[n][0], b[n][1]);
#pragma unroll
    for (int n = 0; n < 4; ++n) mma_1688_tf32(mixed[n], a, b_lower[n][0], b_lower[n][1]);
  }
  __device__ __forceinline__ float result(int n, int i) const {
    const float x = upper[n][i], all = x + mixed[n][i];
    return fabsf(x) < __int_as_float(0x7f800000) ? all : x;
  }
};

/// out[16 x kColumns] = rows tile^T, from addresses of shared memory.
template <int kD, int kColumns>
__device__ __forceinline__ void f32_products(float (&out)[kColumns / 8][4], std::uint32_t rows,
                                             std::uint32_t tile) {
  constexpr int kPitch = (kD + 4) * 4;
  const int lane = threadIdx.x % 32;
  const std::uint32_t a_at = rows + lane % 16 * kPitch + lane / 16 * 16;
  const std::uint32_t b_at = tile + (lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16;
#pragma unroll
  for (int n0 = 0; n0 < kColumns / 8; n0 += 4) {
    F32Products all;
    all.clear();
#pragma unroll 8
    for (int step = 0; step < kD / 8; ++step) {
      std::uint32_t a[4], b[4][2];
      load_matrix_x4(a, a_at + step * 32);
#pragma unroll
      for (int n = 0; n < 4; n += 2) {
        std::uint32_t two[4];
        load_matrix_x4(two, b_at + (n0 + n) * 8 * kPitch + step * 32);
        b[n][0] = two[0], b[n][1] = two[1], b[n + 1][0] = two[2], b[n + 1][1] = two[3];
      }
      all.add(a, b);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n0 + n][i] = all.result(n, i);
    }
  }
}

/// sum[16 x kD] += values tile. A lane's values are of neighbouring columns, the cores want them 4
/// apart: the rows of the tile are taken in that order.
template <int kD, int kRows>
__device__ __forceinline__ void f32_add(float (&sum)[kD / 8][4],
                                        const float (&values)[kRows / 8][4], const float* tile) {
  constexpr int kPitch = kD + 4;
  const int lane = threadIdx.x % 32;
  const float* from = tile + lane % 4 * 2 * kPitch + lane / 4;
#pragma unroll
  for (int d0 = 0; d0 < kD / 8; d0 += 4) {
    F32Products all;
    all.clear();
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n) {
      std::uint32_t a[4], b[4][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = __float_as_uint(values[n][i % 2 * 2 + i / 2]);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const float* at = from + n * 8 * kPitch + (d0 + d) * 8;
        b[d][0] = __float_as_uint(at[0]), b[d][1] = __float_as_uint(at[kPitch]);
      }
      all.add(a, b);
    }
#pragma unroll
    for (int d = 0; d < 4; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[d0 + d][i] += all.result(d, i);
    }
  }
}

/// kRows rows of a [*, dim] matrix of 16-byte aligned rows; zeros beyond `valid` rows and `dim`.
template <int kD, int kRows, int kThreads>
__device__ __forceinline__ void f32_copy(std::uint32_t to, const float* from, std::int64_t pitch,
                                         int valid, int dim) {
  constexpr int kStep = kThreads / (kD / 4);  // rows at once
  const int row0 = threadIdx.x / (kD / 4), d = threadIdx.x % (kD / 4) * 4;
  const std::uint32_t at = to + (row0 * (kD + 4) + d) * 4;
  const float* mine = from + row0 * pitch + d;
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const bool inside = row0 + i * kStep < valid && d < dim;
    copy_16_async(at + i * kStep * (kD + 4) * 4, inside ? mine + i * kStep * pitch : from, inside);
  }
}

}  // namespace rm::cuda_ops
