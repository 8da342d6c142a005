// 16 bytes of any float dtype as four words. As packs of 16-bit values they would take twice the
// registers while they wait, and twice the instructions.
#pragma once

#include <type_traits>

#include "_shim/device_shim.cuh"

namespace rm::cuda_ops {

template <class T>
__device__ __forceinline__ void unpack(const uint4& w, float (&v)[kVec<T>]) {
  const std::uint32_t word[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (std::is_same_v<T, float>) {
      v[k] = __uint_as_float(word[k]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      v[2 * k] = __uint_as_float(word[k] << 16);
      v[2 * k + 1] = __uint_as_float(word[k] & 0xffff0000u);
    } else {
      const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&word[k]));
      v[2 * k] = f.x, v[2 * k + 1] = f.y;
    }
  }
}

/// The same of 8 bytes.
template <class T>
__device__ __forceinline__ void unpack(const uint2& w, float (&v)[kVec<T> / 2]) {
  float wide[kVec<T>];
  unpack<T>(make_uint4(w.x, w.y, 0, 0), wide);
#pragma unroll
  for (int k = 0; k < kVec<T> / 2; ++k) v[k] = wide[k];
}

}  // namespace rm::cuda_ops
