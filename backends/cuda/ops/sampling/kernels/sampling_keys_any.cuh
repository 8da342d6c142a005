// Logits as integers that order them, with their indices; the first largest of a row's vectors; the
// random bits of a draw.
#pragma once

#include <type_traits>

#include "_shim/words_shim.cuh"

namespace rm::cuda_ops {

using Mass = unsigned long long;

/// Larger logits have larger keys; -0 is 0, NaN is the largest. The bits that tell T apart.
template <class T>
inline constexpr int kKeyBits = sizeof(T) == 4              ? 32
                                : std::is_same_v<T, __half> ? 19
                                                            : 16;
template <class T>
__device__ __forceinline__ std::uint32_t sampling_key(float v) {
  const std::uint32_t b = __float_as_uint(v + 0.0f);
  const std::uint32_t key = v != v ? 0xffffffffu : b & 0x80000000u ? ~b : b | 0x80000000u;
  return key >> (32 - kKeyBits<T>);
}

/// A logit and its index: larger logits, then lower indices are larger.
__device__ __forceinline__ Mass sampling_place(float v, int index) {
  return static_cast<Mass>(sampling_key<float>(v)) << 32 |
         (0xffffffffu - static_cast<unsigned>(index));
}
__device__ __forceinline__ int sampling_index(Mass place) {
  return static_cast<int>(0xffffffffu - static_cast<unsigned>(place));
}
__device__ __forceinline__ float sampling_value(Mass place) {
  const auto key = static_cast<std::uint32_t>(place >> 32);
  if (key == 0xffffffffu) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/// The first largest of 16-byte vectors that come in order.
template <class T>
struct SamplingLargest {
  static constexpr int V = kVec<T>;
  float value = -__builtin_huge_valf();
  int start;  // of the vector where it was
  uint4 kept;

  __device__ explicit SamplingLargest(int first) : start(first) {
    Pack<T, V> none;
#pragma unroll
    for (int j = 0; j < V; ++j) none.v[j] = from_float<T>(value);
    kept = reinterpret_cast<const uint4&>(none);
  }
  /// NaN wins.
  __device__ __forceinline__ static float largest(const uint4& w) {
    if constexpr (sizeof(T) == 2) {
      using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
      Pair pair[4];
      memcpy(pair, &w, 16);
      const Pair best = __hmax2_nan(__hmax2_nan(pair[0], pair[1]), __hmax2_nan(pair[2], pair[3]));
      return Max{}(to_float(best.x), to_float(best.y));
    } else {
      float v[4];
      unpack<T>(w, v);
      return Max{}(Max{}(v[0], v[1]), Max{}(v[2], v[3]));
    }
  }
  __device__ __forceinline__ void take(const uint4& w, int first) {
    const float best = largest(w);
    if (!(best <= value) && value == value) value = best, kept = w, start = first;
  }
  __device__ __forceinline__ Mass key() const {
    float v[V];
    unpack<T>(kept, v);
    int at = V - 1;
#pragma unroll
    for (int j = V - 2; j >= 0; --j) {
      if (v[j] == value || v[j] != v[j]) at = j;
    }
    return sampling_place(value, start + at);
  }
};

/// The first 64 bits of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
/// 3", 2011) for a seed and a 128-bit counter.
__device__ inline Mass philox_bits(Mass seed, Mass counter, Mass subsequence) {
  std::uint32_t c0 = static_cast<std::uint32_t>(counter),
                c1 = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(subsequence);
  std::uint32_t c3 = static_cast<std::uint32_t>(subsequence >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
    const std::uint32_t h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return static_cast<Mass>(c1) << 32 | c0;
}

}  // namespace rm::cuda_ops
