// int8 and int4 weights against one row of 16-bit x, by integer tensor cores: nothing is widened.
// Each segment of x (64 bytes of a row of w) becomes whole numbers of 23 bits (of those that meet
// high nibbles 19) times a power of two, three signed digits of a byte each. A product's 16 rows
// are eight rows of w in two segments, its 8 columns the digits of x in the same two: every lane
// ends with one digit of two rows, and adds it, scaled, to fp32 sums. Nibbles are used as they lie:
// 8 added, the high ones 16 times as large. Where x holds NaN or Inf a plain loop does the call.
#pragma once

#include "gemv/kernels/gemv_naive_any.cuh"
#include "gemv/kernels/gemv_ring_sm90.cuh"

namespace rm::cuda_ops {

/// Products of whole numbers start here: as a float's bits, an int c added to it reads kBase + c.
inline constexpr int kSumBase = 0x4B400000;
inline constexpr float kSumBaseValue = 12582912.0f;

inline constexpr int kGemvZeros = 832;  // where shared memory holds 16 bytes of zeros

/// c[16x8] = a[16x32] b[32x8] + start, bytes: a int8 or nibbles, b int8.
template <int kBits>
__device__ __forceinline__ void mma_bytes(int (&c)[4], const int (&start)[4], std::uint32_t a0,
                                          std::uint32_t a1, std::uint32_t a2, std::uint32_t a3,
                                          std::uint32_t b0, std::uint32_t b1) {
#define RM_MMA_BYTES(A)                                                                     \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." A                                            \
      ".s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"                   \
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])                                      \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(start[0]), "r"(start[1]), \
        "r"(start[2]), "r"(start[3]))
  if constexpr (kBits == 8) {
    RM_MMA_BYTES("s8");
  } else {
    RM_MMA_BYTES("u8");
  }
#undef RM_MMA_BYTES
}

__device__ __forceinline__ uint4 shared_16(const unsigned char* at) {
  return *reinterpret_cast<const uint4*>(at);
}

/// Calls f(i, vector i of x) for this thread's vectors below `all`, zeros behind K, whole warps at
/// a time. Loads go first: their latency is what the kernels of a chain wait for. Past the L1
/// cache: a kernel that still runs beside this one may have left an old x there.
template <class F>
__device__ __forceinline__ void gemv_each_x(const GemvArgs& p, int all, const F& f) {
  constexpr int kBatch = 3;
  const auto* x = static_cast<const uint4*>(p.x);
  const int vectors = p.k / 8, step = blockDim.x, lane = threadIdx.x % 32;
  for (int i0 = threadIdx.x; i0 - lane < all; i0 += kBatch * step) {
    uint4 v[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      v[j] = i0 + j * step < vectors ? __ldcg(x + i0 + j * step) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (i0 + j * step - lane < all) f(i0 + j * step, v[j]);
    }
  }
}

__device__ __forceinline__ float power_of_two(int field) { return __int_as_float(field << 23); }

/// Eight values of x, one vector of a segment's, as three digits of a byte each; a segment's lanes
/// do it together. scale: the segment's power of two and, for nibbles (8 added), -8 times x's sum.
/// True where some x is not finite, or so large (2^113) that a digit's products might not be.
template <class T, int kBits>
__device__ __forceinline__ bool gemv_cut(const uint4& v, std::uint32_t (&word)[3][2],
                                         float2& scale) {
  constexpr int kGroup = 64 / kBits;  // vectors of a segment
  constexpr std::uint32_t kTooLarge = std::is_same_v<T, __half> ? 0x7c00 : 0x7800;
  constexpr std::uint32_t kMask = 0x7fff7fffu;
  const std::uint32_t two =
      __vmaxu2(__vmaxu2(v.x & kMask, v.y & kMask), __vmaxu2(v.z & kMask, v.w & kMask));
  std::uint32_t most = max(two & 0xffffu, two >> 16);
#pragma unroll
  for (int k = 1; k < kGroup; k <<= 1) most = max(most, __shfl_xor_sync(0xffffffffu, most, k));
  Pack<T, 8> values;
  memcpy(&values, &v, 16);
  const auto top = static_cast<unsigned short>(most);
  T largest;
  memcpy(&largest, &top, 2);
  // values are below 2^(field - 126): times 2^(148 - field) they are below 2^22
  const int field = max(__float_as_int(to_float(largest)) >> 23, 22);
  const float up = power_of_two(275 - field), down = power_of_two(field - 21);
  constexpr int kCarry = 0x8080;  // makes the lower digits signed, their top bits turned over
  int whole[8], sum = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const bool high = kBits == 4 && j % 2 != 0;  // meets 16 times its nibble
    const float scaled = to_float(values.v[j]) * (high ? up * 0.0625f : up);
    whole[j] = __float_as_int(scaled + kSumBaseValue) - (kSumBase - kCarry);
    sum += (whole[j] - kCarry) * (high ? 16 : 1);
  }
  if constexpr (kBits == 4) {
#pragma unroll
    for (int k = 1; k < kGroup; k <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, k);
  }
  scale = make_float2(down, kBits == 4 ? -8.0f * static_cast<float>(sum) * down : 0);
  // int8: values 0 1 2 3, 4 5 6 7; nibbles: 0 2 4 6, 1 3 5 7
  constexpr int kNext = kBits == 4 ? 2 : 1, kSecond = kBits == 4 ? 1 : 4;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int* from = whole + h * kSecond;
    const std::uint32_t low = __byte_perm(from[0], from[kNext], 0x5140),
                        low2 = __byte_perm(from[2 * kNext], from[3 * kNext], 0x5140);
    word[0][h] = __byte_perm(__byte_perm(from[0], from[kNext], 0x0062),
                             __byte_perm(from[2 * kNext], from[3 * kNext], 0x0062), 0x5410);
    word[1][h] = __byte_perm(low, low2, 0x7632) ^ 0x80808080u;
    word[2][h] = __byte_perm(low, low2, 0x5410) ^ 0x80808080u;
  }
  return most >= kTooLarge;
}

/// x for quantised w (gemv_cut): each digit a plane of 16-byte vectors in the order in which lanes
/// meet w; zeros behind K. True where a plain loop must do the call.
template <class T, int kBits>
__device__ __forceinline__ bool gemv_digits(const GemvArgs& p, unsigned char* to, float2* scale,
                                            unsigned char* zeros) {
  constexpr int kPlanes = 8 / kBits, kGroup = 8 * kPlanes;  // vectors of a segment
  const int all = p.steps * 8 * kGroup;
  bool bad = false;
  if (threadIdx.x < 4) reinterpret_cast<int*>(zeros)[threadIdx.x] = 0;
  gemv_each_x(p, all, [&](int i, const uint4& v) {
    std::uint32_t word[3][2];
    float2 of_segment;
    bad |= gemv_cut<T, kBits>(v, word, of_segment);
    if (i >= all) return;
    const int unit = i / (2 * kPlanes), part = i % (2 * kPlanes);
    unsigned char* at = to + (unit / 8 * kPlanes + part / 2) * 384 + unit % 8 * 16 + part % 2 * 8;
#pragma unroll
    for (int digit = 0; digit < 3; ++digit) {
      *reinterpret_cast<uint2*>(at + digit * 128) = make_uint2(word[digit][0], word[digit][1]);
    }
    if (i % kGroup == 0) scale[unit / 4] = of_segment;
  });
  return bad;
}

/// The products of 16 bytes of two quantised rows with the digits of x.
template <int kBits>
__device__ __forceinline__ void gemv_digit_16(int (&c)[4], const uint4 (&a)[8 / kBits],
                                              const uint4 (&b)[8 / kBits],
                                              const uint4 (&x)[8 / kBits]) {
  constexpr int kStart[4] = {kSumBase, kSumBase, kSumBase, kSumBase};
  if constexpr (kBits == 8) {
    mma_bytes<8>(c, kStart, a[0].x, b[0].x, a[0].y, b[0].y, x[0].x, x[0].y);
    mma_bytes<8>(c, c, a[0].z, b[0].z, a[0].w, b[0].w, x[0].z, x[0].w);
  } else {
    mma_bytes<4>(c, kStart, a[0].x, b[0].x, a[1].x, b[1].x, x[0].x, x[0].y);
    mma_bytes<4>(c, c, a[0].y, b[0].y, a[1].y, b[1].y, x[0].z, x[0].w);
    mma_bytes<4>(c, c, a[0].z, b[0].z, a[1].z, b[1].z, x[1].x, x[1].y);
    mma_bytes<4>(c, c, a[0].w, b[0].w, a[1].w, b[1].w, x[1].z, x[1].w);
  }
}
/// 16 bytes as they are, or low nibbles of each and 16 times the high ones.
template <int kBits>
__device__ __forceinline__ void gemv_bytes_16(uint4 (&out)[8 / kBits], const uint4& v) {
  out[0] = v;
  if constexpr (kBits == 4) {
    constexpr std::uint32_t kLow = 0x0f0f0f0fu;
    out[0] = uint4{v.x & kLow, v.y & kLow, v.z & kLow, v.w & kLow};
    out[1] = uint4{v.x & ~kLow, v.y & ~kLow, v.z & ~kLow, v.w & ~kLow};
  }
}

/// x holds NaN or Inf: `rows` rows from row0 on, and from every further `step`, by plain
/// arithmetic.
template <class T>
__device__ __noinline__ void gemv_plain(const GemvArgs& p, int row0, int rows, int step) {
  const T* x = static_cast<const T*>(p.x);
  for (; row0 < p.n; row0 += step) {
    for (int n = row0 + threadIdx.x / 32; n < min(row0 + rows, p.n); n += blockDim.x / 32) {
      float sum = 0.0f;
      for (int k = threadIdx.x % 32; k < p.k; k += 32) {
        sum += to_float(x[k]) * gemv_weight<T>(p, n, k);
      }
      sum = warp_reduce<Sum>(sum);
      if (threadIdx.x % 32 != 0) continue;
      static_cast<T*>(p.y)[n] = from_float<T>(epilogue_value<T>(p.epilogue, sum, 0, 0, n));
    }
  }
}

/// Sums of a lane: two rows, one digit of x, one segment.
struct GemvDigitSums {
  float sum[2];
  __device__ void clear() { sum[0] = sum[1] = 0.0f; }
  __device__ __forceinline__ void store(float* to) {
    to[threadIdx.x % 32] = sum[0];
    to[threadIdx.x % 32 + 32] = sum[1];
  }
};

/// Sums over one tile that has arrived; `chunk` of its rows: 128 bytes of eight rows at a time.
template <class T, int kBits>
__device__ __forceinline__ void gemv_digit_tile(const GemvArgs& p, const GemvMemory& s,
                                                const unsigned char* stage, int chunk,
                                                GemvDigitSums& sums) {
  constexpr int kVectors = 8 / kBits, kUnitK = 64 * kVectors;  // values of a segment
  const int lane = threadIdx.x % 32, segment = lane / 4 % 2, row = lane / 8, t = lane % 4;
  const int blocks = (min(p.chunk_bytes, p.row_bytes - chunk * p.chunk_bytes) + 127) / 128;
  const int first_block = chunk * (p.chunk_bytes / 128), k0 = first_block * 2 * kUnitK;
  // as the second operand a lane holds digit `row` of x; the fourth column's are zeros
  const int plane = row < 3 ? 384 : 0;
  const unsigned char* w = stage + row * p.chunk_bytes + lane % 8 * 16;
  const unsigned char* x =
      s.base +
      (row < 3 ? s.x + first_block * kVectors * 384 + row * 128 + lane % 8 * 16 : kGemvZeros);
  // as the result it holds digit t of a row; that column's lanes add -8 sum(x) instead
  const float worth = t == 0 ? 65536.0f : t == 1 ? 256.0f : t == 2 ? 1.0f : 0.0f;
  const float whole = t == 3 ? 1.0f : 0.0f;
  const auto* of_x = reinterpret_cast<const float2*>(s.base + s.x_sums) + first_block * 2 + segment;
  const int shift = p.group_shift - 3;  // eight scales a group
  const T* scales =
      reinterpret_cast<const T*>(stage + p.scales_at) + row - (k0 >> p.group_shift) * 8;
#pragma unroll 2
  for (int i = 0; i < blocks; ++i) {
    uint4 xs[kVectors], a[kVectors], b[kVectors];
#pragma unroll
    for (int j = 0; j < kVectors; ++j) xs[j] = shared_16(x + (i * kVectors + j) * plane);
    gemv_bytes_16<kBits>(a, shared_16(w + i * 128));
    gemv_bytes_16<kBits>(b, shared_16(w + 4 * p.chunk_bytes + i * 128));
    const float2 scale = of_x[i * 2];
    const int k = min(k0 + (i * 2 + segment) * kUnitK, p.k - 1);
    const T* of_group = scales + (k >> shift & -8);
    int c[4];
    gemv_digit_16<kBits>(c, a, b, xs);
    const float by = scale.x * worth, start = kBits == 4 ? scale.y * whole : 0.0f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float v = __int_as_float(segment ? c[2 * j + 1] : c[2 * j]) - kSumBaseValue;
      sums.sum[j] += fmaf(v, by, start) * to_float(of_group[4 * j]);
    }
  }
}

/// Scales of a tile's eight rows, 16 bytes a group, one a lane and turn; every lane arrives when
/// its own are there.
template <class T, int kBits>
__device__ __forceinline__ void gemv_ask_tile_scales(const GemvArgs& p, const GemvTile& t,
                                                     std::uint32_t bar, std::uint32_t at) {
  const int row0 = (blockIdx.x + t.turn * gridDim.x) * 8, chunk_k = p.chunk_bytes * (8 / kBits);
  const int k0 = t.chunk * chunk_k, k1 = min(k0 + chunk_k, p.k);
  const int first = k0 >> p.group_shift, last = (k1 - 1) >> p.group_shift;
  for (int i = threadIdx.x % 32; i <= last - first; i += 32) {
    copy_16_async(at + i * 16,
                  static_cast<const T*>(p.scales) + (first + i) * p.scales_pitch + row0, true);
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

}  // namespace rm::cuda_ops
