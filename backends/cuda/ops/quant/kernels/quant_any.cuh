// A weight into integers of few bits and a scale a group, and back. Memory bound, both.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/launch_shim.hpp"

namespace rm::cuda_ops {

struct QuantArgs {
  const void* w;  // quantize: dense [n, k]
  void* y;        // dequantize: rows of `padded` elements
  std::uint8_t* q;
  void* scales;   // [groups, n], dense along n
  std::int64_t n, k, padded, groups, scales_pitch;
  int group;
  bool vectors;   // q lies on whole eights of bytes
};

template <int kBits>
__device__ __forceinline__ unsigned quantized(float w, float scale) {
  constexpr float kZero = kBits == 4 ? 8.0f : 0.0f, kLow = kBits == 4 ? 0.0f : -127.0f,
                  kHigh = kBits == 4 ? 15.0f : 127.0f;
  if (scale == 0.0f || isnan(scale)) return static_cast<unsigned>(kZero);
  const float q = rintf(__fdiv_rn(w, scale)) + kZero;
  return static_cast<unsigned>(static_cast<int>(fminf(fmaxf(q, kLow), kHigh))) & 255u;
}

/// A warp a group of a row. Of elements of one magnitude the first gives the scale its sign.
template <class T, int kBits>
__global__ void __launch_bounds__(256) quantize_groups(const QuantArgs a) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * 8;
  for (std::int64_t i = blockIdx.x * 8ll + threadIdx.x / 32; i < a.n * a.groups; i += step) {
    const std::int64_t row = i / a.groups, g = i % a.groups, from = g * a.group;
    const T* w = static_cast<const T*>(a.w) + row * a.k + from;
    const int count = static_cast<int>(min(static_cast<std::int64_t>(a.group), a.k - from));
    float most = 0.0f;
    int at = 1 << 30;
    bool finite = true;
    for (int j = lane; j < count; j += 32) {
      const float v = to_float(w[j]);
      if (fabsf(v) > fabsf(most)) most = v, at = j;
      finite = finite && isfinite(v);
    }
    for (int apart = 16; apart > 0; apart /= 2) {
      const float other = __shfl_xor_sync(~0u, most, apart);
      const int other_at = __shfl_xor_sync(~0u, at, apart);
      const bool more = fabsf(other) > fabsf(most);
      if (more || (fabsf(other) == fabsf(most) && other_at < at)) most = other, at = other_at;
    }
    finite = __all_sync(~0u, finite) != 0;
    const float wanted = kBits == 8 ? __fdiv_rn(fabsf(most), 127.0f) : __fdiv_rn(most, -8.0f);
    const T stored = from_float<T>(finite ? wanted : nanf(""));
    if (lane == 0) static_cast<T*>(a.scales)[g * a.scales_pitch + row] = stored;
    const float scale = to_float(stored);
    // The last group's warp writes the row's padding.
    const std::int64_t end = g + 1 == a.groups ? a.padded : from + a.group;
    const auto value = [&](int j) {
      return j < count ? quantized<kBits>(to_float(w[j]), scale) : 0u;
    };
    std::uint8_t* q = a.q + (row * a.padded + from) * kBits / 8;
    const int bytes = static_cast<int>((end - from) * kBits / 8);
    for (int b = lane; b < bytes; b += 32) {
      const unsigned both = kBits == 8 ? value(b) : value(2 * b) | value(2 * b + 1) << 4;
      q[b] = static_cast<std::uint8_t>(both);
    }
  }
}

/// A thread eight neighbours of a row, which have one scale.
template <class T, int kBits>
__global__ void __launch_bounds__(256) dequantize_eights(const QuantArgs a) {
  overlap_begin(a.q, a.scales, a.y);
  const std::int64_t eights = a.padded / 8, total = a.n * eights;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * 256;
  for (std::int64_t i = blockIdx.x * 256ll + threadIdx.x; i < total; i += step) {
    const std::int64_t row = i / eights, k = i % eights * 8;
    const std::uint8_t* q = a.q + i * kBits;
    std::uint8_t bytes[kBits];
    if (a.vectors) {
      const Pack<std::uint8_t, kBits> loaded =
          *reinterpret_cast<const Pack<std::uint8_t, kBits>*>(q);
#pragma unroll
      for (int j = 0; j < kBits; ++j) bytes[j] = loaded.v[j];
    } else {
#pragma unroll
      for (int j = 0; j < kBits; ++j) bytes[j] = q[j];
    }
    const auto* scales = static_cast<const T*>(a.scales) + k / a.group * a.scales_pitch;
    const float scale = k < a.k ? to_float(scales[row]) : 0.0f;
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int integer = kBits == 8 ? static_cast<std::int8_t>(bytes[j % kBits])
                                     : (bytes[j / 2] >> (j % 2 * 4) & 15) - 8;
      v[j] = k + j < a.k ? static_cast<float>(integer) * scale : 0.0f;
    }
    store_vec<T, 8>(static_cast<T*>(a.y) + i * 8, v);
  }
}

}  // namespace rm::cuda_ops
