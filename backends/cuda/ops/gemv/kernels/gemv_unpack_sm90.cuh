// A lane's share of a step: 16 bytes of a row of w and the x values that meet them. Values widen to
// T exactly (int8 and int4 have at most 8 significant bits). A step is 64 bytes a row: lanes of the
// same row hold 16 consecutive bytes each.
#pragma once

#include "_shim/async_shim.cuh"
#include "_shim/device_shim.cuh"

namespace rm::cuda_ops {

__device__ __forceinline__ uint4 read_16(const unsigned char* at, bool inside) {
  const uint4 v = *reinterpret_cast<const uint4*>(at);
  return inside ? v : uint4{0, 0, 0, 0};
}

/// kPairs registers of two T each; element order within a step is that of GemvX below.
template <class T, int kBits>
struct GemvUnpack {
  static constexpr int kPairs = kBits == 0 ? 4 : kBits == 8 ? 8 : 16;
  static __device__ __forceinline__ void weights(uint4 v, std::uint32_t (&out)[kPairs]) {
    const std::uint32_t word[4] = {v.x, v.y, v.z, v.w};
    if constexpr (kBits == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = word[i];
    } else if constexpr (kBits == 8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) bytes(word[i], out[2 * i], out[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[4 * i + j] = nibbles(word[i] >> 4 * j);
      }
    }
  }

  /// Eight neighbouring weights, 8 * kBits / 32 words; those of 4 bits as pairs (0,4) (1,5) (2,6) (3,7).
  static __device__ __forceinline__ void eight(const std::uint32_t (&word)[kBits / 4],
                                               std::uint32_t (&out)[4]) {
    static_assert(kBits == 8 || kBits == 4);
    if constexpr (kBits == 8) {
      bytes(word[0], out[0], out[1]);
      bytes(word[1], out[2], out[3]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] = nibbles(word[0] >> 4 * j);
    }
  }

 private:
  /// Four signed bytes as two pairs.
  static __device__ __forceinline__ void bytes(std::uint32_t u, std::uint32_t& lo,
                                               std::uint32_t& hi) {
    if constexpr (sizeof(T) == 2 && std::is_same_v<T, __half>) {  // 0x64uu is 1024 + u
      u ^= 0x80808080u;                                           // 128 added
      const __half2 bias = __half2half2(__ushort_as_half(0x6480));
      const std::uint32_t a = __byte_perm(u, 0x64646464u, 0x4140),
                          b = __byte_perm(u, 0x64646464u, 0x4342);
      const __half2 x = __hsub2(*reinterpret_cast<const __half2*>(&a), bias),
                    y = __hsub2(*reinterpret_cast<const __half2*>(&b), bias);
      lo = *reinterpret_cast<const std::uint32_t*>(&x);
      hi = *reinterpret_cast<const std::uint32_t*>(&y);
    } else {  // 0x4300 | 7 bits is 128 + them; the sign's worth is 0x4300 (128) or 0x4380 (256)
      lo = signed_pair(__byte_perm(u, 0, 0x4140));
      hi = signed_pair(__byte_perm(u, 0, 0x4342));
    }
  }
  static __device__ __forceinline__ std::uint32_t signed_pair(std::uint32_t w) {
    const std::uint32_t a = (w & 0x007f007fu) | 0x43004300u, b = (w & 0x00800080u) | 0x43004300u;
    const __nv_bfloat162 x = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                     *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const std::uint32_t*>(&x);
  }

  /// Nibbles 0 and 4, 8 added, as a pair.
  static __device__ __forceinline__ std::uint32_t nibbles(std::uint32_t w) {
    if constexpr (std::is_same_v<T, __half>) {
      const std::uint32_t a = (w & 0x000f000fu) | 0x64006400u;  // 1024 + u
      const __half2 x =
          __hsub2(*reinterpret_cast<const __half2*>(&a), __half2half2(__ushort_as_half(0x6408)));
      return *reinterpret_cast<const std::uint32_t*>(&x);
    } else {
      const std::uint32_t a = (w & 0x000f000fu) | 0x43004300u;  // 128 + u
      const __nv_bfloat162 x = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                       __bfloat162bfloat162(__ushort_as_bfloat16(0x4308)));
      return *reinterpret_cast<const std::uint32_t*>(&x);
    }
  }
};

/// The x pairs that meet a lane's weights, in the order GemvUnpack gives those.
template <int kBits, int kPairs>
__device__ __forceinline__ void gemv_x(const uint4 (&in)[kPairs / 4],
                                       std::uint32_t (&out)[kPairs]) {
#pragma unroll
  for (int i = 0; i < kPairs / 4; ++i) {
    const uint4 v = in[i];
    if constexpr (kBits == 4) {  // pairs (0,4) (1,5) (2,6) (3,7)
      out[4 * i] = __byte_perm(v.x, v.z, 0x5410);
      out[4 * i + 1] = __byte_perm(v.x, v.z, 0x7632);
      out[4 * i + 2] = __byte_perm(v.y, v.w, 0x5410);
      out[4 * i + 3] = __byte_perm(v.y, v.w, 0x7632);
    } else {
      out[4 * i] = v.x, out[4 * i + 1] = v.y, out[4 * i + 2] = v.z, out[4 * i + 3] = v.w;
    }
  }
}

}  // namespace rm::cuda_ops
