// Rows that wait in registers as 16-byte words: kept as 16-bit values over a loop they take a
// register each, and twice the instructions.
#pragma once

#include <type_traits>

#include "_shim/async_shim.cuh"
#include "_shim/device_shim.cuh"

namespace rm::cuda_ops {

/// A thread's share of a row: kPer vectors, `threads` vectors apart; zeros beyond n.
template <class T, int kPer>
struct RowWords {
  uint4 v[kPer];
  __device__ __forceinline__ void load(const void* base, std::int64_t offset, int thread,
                                       int threads, int n) {
    const T* row = static_cast<const T*>(base) + offset;
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      const int i = (thread + k * threads) * kVec<T>;
      v[k] = uint4{0, 0, 0, 0};
      if (i < n) v[k] = *reinterpret_cast<const uint4*>(row + i);
    }
  }
  __device__ __forceinline__ float value(int k, int j) const {
    const std::uint32_t w[4] = {v[k].x, v[k].y, v[k].z, v[k].w};
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(w[j]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(j % 2 ? w[j / 2] & 0xffff0000u : w[j / 2] << 16);
    } else {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(w[j / 2] >> (j % 2 * 16))));
    }
  }
  /// The values are widened again at their next use.
  __device__ __forceinline__ void forget(int k) {
    asm volatile("" : "+r"(v[k].x), "+r"(v[k].y), "+r"(v[k].z), "+r"(v[k].w));
  }
};

/// Sixteen bytes of values, as one store.
template <class T>
__device__ __forceinline__ void store_words(T* dst, const float (&v)[kVec<T>]) {
  uint4 w;
  if constexpr (sizeof(T) == 4) {
    w = uint4{__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]),
              __float_as_uint(v[3])};
  } else {
    w = uint4{pack_pair<T>(v[0], v[1]), pack_pair<T>(v[2], v[3]), pack_pair<T>(v[4], v[5]),
              pack_pair<T>(v[6], v[7])};
  }
  *reinterpret_cast<uint4*>(dst) = w;
}

}  // namespace rm::cuda_ops
