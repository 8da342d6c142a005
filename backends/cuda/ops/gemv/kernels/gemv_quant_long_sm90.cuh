// int8 and int4 weights of long rows that as many blocks as run at once read in one turn, against one row of
// 16-bit x, without the digits of gemv_quant_sm90: cutting x takes longer than all products of the turn. Bytes
// and nibbles become float16 (bits of 1024 set above them, and 1024 taken away), x float16 times a power of two a
// segment, so that what its 16 bits hold stays. A product's 16 rows are two rows of w in eight segments of 128
// values, its 8 columns the segments of x; only where the two agree is the result of use, and there a segment's
// scale multiplies it. Half of the rows are widened before x is asked for. For K <= 8192. Bound: reading w.
#pragma once

#include "gemv/kernels/gemv_quant_sm90.cuh"

namespace rm::cuda_ops {

inline constexpr int kGemvLongWarps = 8, kGemvLongRows = 8, kGemvLongMost = 8192;
/// Neighbouring columns of a lane, in eights; pairs of rows that are widened early.
inline constexpr int kGemvLongEights = 4, kGemvLongHeld = 2;

__device__ __forceinline__ __half2 gemv_half2(std::uint32_t bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}
__device__ __forceinline__ std::uint32_t gemv_bits_of(__half2 v) {
  return *reinterpret_cast<const std::uint32_t*>(&v);
}
/// a & b, then | c or ^ c, in one instruction: constants in registers.
__device__ __forceinline__ std::uint32_t gemv_and_or(std::uint32_t a, std::uint32_t b,
                                                     std::uint32_t c) {
  std::uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
__device__ __forceinline__ std::uint32_t gemv_and_xor(std::uint32_t a, std::uint32_t b,
                                                      std::uint32_t c) {
  std::uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

/// Eight neighbouring values as four pairs: of bytes (0,2) (1,3) (4,6) (5,7), of nibbles (0,4) (1,5) (2,6) (3,7).
template <int kBits>
__device__ __forceinline__ void gemv_long_eight(const std::uint32_t* w, std::uint32_t (&out)[4]) {
  if constexpr (kBits == 8) {
    const __half2 offset = gemv_half2(0x64806480u);  // 1024 + 128
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const std::uint32_t set = gemv_and_xor(w[i / 2] >> i % 2 * 8, 0x00ff00ffu, 0x64806480u);
      out[i] = gemv_bits_of(__hsub2(gemv_half2(set), offset));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const std::uint32_t low = gemv_and_or(w[0] >> i * 4, 0x000f000fu, 0x64006400u),
                          high = gemv_and_or(w[0] >> i * 4, 0x00f000f0u, 0x64006400u);
      out[i] = gemv_bits_of(__hsub2(gemv_half2(low), gemv_half2(0x64086408u)));  // 1024 + 8
      out[i + 1] = gemv_bits_of(__hfma2(gemv_half2(high), gemv_half2(0x2c002c00u),  // 1 / 16
                                        gemv_half2(0xd480d480u)));                  // -64 - 8
    }
  }
}

/// The first of a lane's columns `eight` * 8, + 8; lanes of odd segments read bytes in another order, for
/// the sake of shared memory's banks.
template <int kBits>
__device__ __forceinline__ int gemv_long_column(int eight) {
  const int lane = threadIdx.x % 32;
  if (kBits == 8 && lane / 4 % 2 == 1) eight ^= 2;
  return ((uniform_warp() * 32 + lane) * kGemvLongEights + eight) * 8;
}

/// A lane's columns of a row.
template <int kBits>
__device__ __forceinline__ void gemv_long_widen(const unsigned char* row,
                                                std::uint32_t (&out)[kGemvLongEights][4]) {
  constexpr int kEach = 16 / kBits;  // eights of 16 bytes
#pragma unroll
  for (int i = 0; i < kGemvLongEights; i += kEach) {
    const uint4 v = *reinterpret_cast<const uint4*>(row + gemv_long_column<kBits>(i) * kBits / 8);
    const std::uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < kEach; ++j) gemv_long_eight<kBits>(words + j * (4 / kEach), out[i + j]);
  }
}

/// x of a lane's columns as its weights' pairs.
template <int kBits>
struct GemvLongX {
  std::uint32_t pairs[kGemvLongEights][4];
  float worth;  // what the pairs count for

  template <class T>
  __device__ __forceinline__ void take(const uint4 (&in)[kGemvLongEights]) {
    float v[kGemvLongEights][8], top = 0.0f;
#pragma unroll
    for (int i = 0; i < kGemvLongEights; ++i) {
      load_vec<T, 8>(reinterpret_cast<const T*>(&in[i]), v[i]);
#pragma unroll
      for (int j = 0; j < 8; ++j) top = fmaxf(top, fabsf(v[i][j]));
    }
    // of the segment: the lanes of a column of products
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    // The largest becomes 2^14 to 2^15. Where it is infinite or so small that its inverse is, the rest is nothing.
    const int power = min(268 - (__float_as_int(top) >> 23), 253);
    const float scale = __int_as_float(power << 23);
    worth = __int_as_float((254 - power) << 23);
#pragma unroll
    for (int i = 0; i < kGemvLongEights; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        constexpr int kApart = kBits == 8 ? 2 : 4;
        const int at = kBits == 8 ? j / 2 * 4 + j % 2 : j;
        pairs[i][j] = pack_pair<__half>(v[i][at] * scale, v[i][at + kApart] * scale);
      }
    }
  }
};

template <class T, int kBits>
__global__ void __launch_bounds__(32 * kGemvLongWarps, 2)
    gemv_quant_long(const __grid_constant__ GemvArgs p) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) unsigned char memory[];
  constexpr int kRows = kGemvLongRows, kEights = kGemvLongEights, kSums = gemv_quant_sums(kRows);
  const int warp = uniform_warp(), lane = threadIdx.x % 32, segment = lane / 4;
  const std::uint32_t bar = shared_address(memory);
  const int row0 = blockIdx.x * kRows;
  if (warp == 0) {
    if (elect_lane()) {
      barrier_init(bar, 1 + 32);
      barrier_init_done();
    }
    __syncwarp();
    gemv_quant_ask<T, kRows>(p, GemvAlone{}, bar, bar + p.stages_at, row0);
  }
  launch_dependents();
  __syncthreads();
  barrier_wait(bar, 0);
  // What lies behind a row, or a row that is not there, are some numbers: x is zero, or nobody asks.
  const unsigned char* w = memory + p.stages_at;
  std::uint32_t held[2 * kGemvLongHeld][kEights][4];
#pragma unroll
  for (int r = 0; r < 2 * kGemvLongHeld; ++r) gemv_long_widen<kBits>(w + r * p.row_bytes, held[r]);
  const int group = min(gemv_long_column<kBits>(0) & ~127, p.k - 1) >> p.group_shift;
  const auto scales = *reinterpret_cast<const Pack<T, kRows>*>(w + p.scales_at + group * 16);
  GemvLongX<kBits> x;
  unsigned char* all = memory + 128;
  auto* to = reinterpret_cast<float*>(all + warp * kSums) + segment;
  const auto add = [&](int pair, const std::uint32_t(&a)[kEights][4],
                       const std::uint32_t(&b)[kEights][4]) {
    float sum[2][4] = {};
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        mma_16816<__half>(sum[h], a[i][2 * h], b[i][2 * h], a[i][2 * h + 1], b[i][2 * h + 1],
                          x.pairs[i][2 * h], x.pairs[i][2 * h + 1]);
      }
    }
    if (lane % 4 != segment / 2) return;  // its columns of products are others
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float v = segment % 2 ? sum[0][2 * r + 1] + sum[1][2 * r + 1] : sum[0][2 * r] + sum[1][2 * r];
      to[(2 * pair + r) * 8] = v * x.worth * to_float(scales.v[2 * pair + r]);
    }
  };
  float residual = 0.0f;
  int once = p.m;  // m is 1
  // A loop, for the compiler moves arithmetic to its use, behind any wait, but not into a loop.
#pragma unroll 1
  do {
    wait_for_previous();  // x is written by the kernel before
    uint4 in[kEights];
#pragma unroll
    for (int i = 0; i < kEights; ++i) {
      const int at = gemv_long_column<kBits>(i);
      in[i] = at < p.k ? __ldcg(static_cast<const uint4*>(p.x) + at / 8) : uint4{0, 0, 0, 0};
    }
    residual = gemv_residual<T, 8>(p, row0, kRows);
    x.template take<T>(in);
#pragma unroll
    for (int pair = 0; pair < kGemvLongHeld; ++pair) add(pair, held[2 * pair], held[2 * pair + 1]);
  } while (--once > 0);
#pragma unroll
  for (int pair = kGemvLongHeld; pair < kRows / 2; ++pair) {
    std::uint32_t a[kEights][4], b[kEights][4];
    gemv_long_widen<kBits>(w + 2 * pair * p.row_bytes, a);
    gemv_long_widen<kBits>(w + (2 * pair + 1) * p.row_bytes, b);
    add(pair, a, b);
  }
  __syncthreads();
  gemv_quant_finish<T, kRows, kGemvLongWarps>(p, all, row0, residual);
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
