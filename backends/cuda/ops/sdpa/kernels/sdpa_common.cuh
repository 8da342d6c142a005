// What the attention kernels share: which keys a row sees, the running softmax, swizzled tiles.
// Scores are kept in units of log2(e), so that exp2 is the exponential.
#pragma once

#include "_shim/async_shim.cuh"
#include "_shim/device_shim.cuh"
#include "sdpa/kernels/sdpa_args.hpp"

namespace rm::cuda_ops {

inline constexpr float kLog2E = 1.44269504088896340736f;
__device__ __forceinline__ float minus_infinity() { return -__int_as_float(0x7f800000); }

/// Past the L1 cache: decoding looks before the kernels in front have ended, and again behind them.
__device__ __forceinline__ int keys_of(const SdpaArgs& p, int batch) {
  if (p.lengths == nullptr) return p.keys;
  const int at = batch * p.lengths_step;
  const std::int64_t n = p.lengths_more +
                         (p.lengths_are_64 ? __ldcg(static_cast<const long long*>(p.lengths) + at)
                                           : __ldcg(static_cast<const int*>(p.lengths) + at));
  return static_cast<int>(n < 0 ? 0 : n < p.keys ? n : p.keys);
}

/// The tiles of `tile_keys` keys that a decoding block takes of a batch's keys.
struct DecodeSpan {
  int keys, begin, end;
  __device__ __forceinline__ DecodeSpan(const SdpaArgs& p, int batch, int tile_keys) {
    keys = keys_of(p, batch);
    const int tiles = (keys + tile_keys - 1) / tile_keys;
    const int each = (tiles + p.splits - 1) / p.splits;
    begin = static_cast<int>(blockIdx.x) * each, end = min(tiles, begin + each);
  }
};

/// Keys that row s of a batch with `keys` keys sees by causality.
__device__ __forceinline__ int visible_keys(const SdpaArgs& p, int keys, int s) {
  if (!p.causal) return keys;
  const std::int64_t n = s + p.causal_offset + 1;
  return static_cast<int>(n < 0 ? 0 : n < keys ? n : keys);
}

/// 2^x by the special-function unit: 2 ulp, exact at -inf.
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// What the mask says of query row s and key j: what is added to the score, or of booleans 0 and -inf.
template <class T>
__device__ __forceinline__ float mask_at(const SdpaArgs& p, int b, int h, int s, int j) {
  const std::int64_t at = b * p.mask_batch + h * p.mask_head + s * p.mask_row + j * p.mask_column;
  if (!p.mask_is_bool) return to_float(static_cast<const T*>(p.mask)[at]);
  return static_cast<const std::uint8_t*>(p.mask)[at] == 0 ? minus_infinity() : 0.0f;
}

/// The score of a product: scaled, masked, in log2 units. What a boolean mask hides is -inf even
/// where the product is NaN.
__device__ __forceinline__ float masked(const SdpaArgs& p, float product, float mask) {
  if (p.mask_is_bool && mask == minus_infinity()) return mask;
  return (product * p.scale + mask) * kLog2E;
}
template <class T>
__device__ __forceinline__ float masked_score(const SdpaArgs& p, float product, int b, int h, int s,
                                              int j) {
  return masked(p, product, p.mask ? mask_at<T>(p, b, h, s, j) : 0.0f);
}

/// Byte offset of 16-byte piece `piece` of row `row` in a tile of rows of kBytes bytes, permuted so
/// that 8 neighbouring rows' pieces lie in different banks.
template <int kBytes>
__device__ __forceinline__ int swizzled(int row, int piece) {
  constexpr int kPieces = kBytes / 16, kMask = kPieces < 8 ? kPieces - 1 : 7;
  return row * kBytes + ((piece ^ (row & kMask)) * 16);
}

}  // namespace rm::cuda_ops
