// What the kernels for several weights of one row of x share, whatever w's type: which weight a turn's
// rows belong to, asking for them, the norm of x, and the end of a turn. Where products are gated half
// of a turn is rows of the first weight, half the same rows of the second.
#pragma once

#include "_shim/async_shim.cuh"
#include "_shim/epilogue_shim.cuh"
#include "gemv/kernels/gemv_args.hpp"

namespace rm::cuda_ops {

/// In place of a group's arguments: one weight, and x as it is.
struct GemvAlone {};
template <class Group>
inline constexpr bool kGemvGroup = !std::is_same_v<Group, GemvAlone>;

/// The part of a group that a turn's rows belong to: no turn has rows of two.
__device__ __forceinline__ int gemv_part(const GemvGroupArgs& g, int row0) {
  return (row0 >= g.first[1] ? 1 : 0) + (row0 >= g.first[2] ? 1 : 0);
}

/// Rows of a part of the group.
__device__ __forceinline__ int gemv_part_rows(const GemvArgs& p, const GemvGroupArgs& g, int part) {
  return (part < 2 ? min(g.first[part + 1], p.n) : p.n) - g.first[part];
}

/// Asks for a turn's rows. Called by one lane.
template <int kRows>
__device__ __forceinline__ void gemv_group_ask(const GemvArgs& p, const GemvGroupArgs& g,
                                               std::uint32_t bar, std::uint32_t stage, int row0,
                                               int have) {
  const bool gated = g.gated != 0;
  const int part = gated ? 0 : gemv_part(g, row0);
  const int row = gated ? row0 / 2 : row0 - g.first[part], each = gated ? have / 2 : have;
  const std::int64_t from = static_cast<std::int64_t>(row) * p.row_bytes;
  barrier_expect(bar, have * p.row_bytes);
  bulk_copy(stage, static_cast<const char*>(g.w[part]) + from, each * p.row_bytes, bar);
  if (gated) {
    bulk_copy(stage + kRows / 2 * p.row_bytes, static_cast<const char*>(g.w[1]) + from,
              each * p.row_bytes, bar);
  }
}

/// Where a block keeps its warps' sums of squares of x, at most 16: behind the barriers.
__device__ __forceinline__ float* gemv_squares(unsigned char* memory) {
  return reinterpret_cast<float*>(memory + 64);
}

/// 16 bytes of x times those of the norm's weight; adds the squares of x.
template <class T>
__device__ __forceinline__ uint4 gemv_normed(const GemvGroupArgs& g, uint4 x, uint4 weight,
                                             float& squares) {
  float a[kVec<T>], w[kVec<T>];
  load_vec<T, kVec<T>>(reinterpret_cast<const T*>(&x), a);
  load_vec<T, kVec<T>>(reinterpret_cast<const T*>(&weight), w);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) {
    squares += a[i] * a[i];
    a[i] *= w[i] + g.weight_offset;
  }
  uint4 out;
  store_vec<T, kVec<T>>(reinterpret_cast<T*>(&out), a);
  return out;
}

/// The elements of a turn's rows. all: every warp's sums, `pitch` apart, eight a row.
template <class T, int kRows, int kWarps>
__device__ __forceinline__ void gemv_group_finish(const GemvArgs& p, const GemvGroupArgs& g,
                                                  const float* squares, const float* all, int pitch,
                                                  int row0, int have) {
  const int i = threadIdx.x;
  if (i >= kRows * 8 && i >= 32) return;
  const bool gated = g.gated != 0;
  const int rows = gated ? kRows / 2 : kRows;
  float v = 0.0f, u = 0.0f;
  for (int k = 0; k < kWarps && i < rows * 8; ++k) {
    v += all[k * pitch + i];
    if (gated) u += all[k * pitch + rows * 8 + i];
  }
#pragma unroll
  for (int k = 1; k < 8; k <<= 1) {
    v += __shfl_xor_sync(0xffffffffu, v, k);
    u += __shfl_xor_sync(0xffffffffu, u, k);
  }
  if (i % 8 != 0 || i / 8 >= (gated ? have / 2 : have)) return;
  if (g.norm != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) sum += squares[k];
    const float inverse = rsqrtf(sum / static_cast<float>(p.k) + g.eps);
    v *= inverse, u *= inverse;
  }
  const int part = gated ? 0 : gemv_part(g, row0);
  const int n = (gated ? row0 / 2 : row0 - g.first[part]) + i / 8;
  if (g.bias[part]) v += to_float(static_cast<const T*>(g.bias[part])[n]);
  v = activate<true>(g.activation, v, 0.0f);
  if (gated) v *= u;
  if (g.residual) v += to_float(static_cast<const T*>(g.residual)[n]);
  static_cast<T*>(g.y[part])[n] = from_float<T>(v);
}

}  // namespace rm::cuda_ops
