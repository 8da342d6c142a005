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

/// A group whose row of x is centred.
template <class Group>
inline constexpr bool kGemvCentred = std::is_same_v<Group, GemvCentredArgs>;

/// A row of x of which each thread of the block has kCount vectors becomes its layer norm, rounded as a norm
/// of its own stores it. at: a vector's first byte in the row, at or behind row_bytes where there is none.
template <class T, int kCount, class At>
__device__ __forceinline__ void gemv_centre(const GemvArgs& p, const GemvCentredArgs& g,
                                            uint4 (&x)[kCount], const At& at) {
  constexpr int V = kVec<T>;
  const auto values = [](const uint4& from, float (&to)[V]) {
    load_vec<T, V>(reinterpret_cast<const T*>(&from), to);
  };
  float v[V], w[V], sum = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values(x[i], v);  // zeros behind the row
#pragma unroll
    for (int j = 0; j < V; ++j) sum += v[j];
  }
  const float mean = block_reduce<Sum>(sum) / static_cast<float>(p.k);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (at(i) >= p.row_bytes) continue;
    values(x[i], v);
#pragma unroll
    for (int j = 0; j < V; ++j) squares += (v[j] - mean) * (v[j] - mean);
  }
  const float inverse = rsqrtf(block_reduce<Sum>(squares) / static_cast<float>(p.k) + g.eps);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (at(i) >= p.row_bytes) continue;
    const auto there = [&](const void* row) {
      return __ldg(reinterpret_cast<const uint4*>(static_cast<const char*>(row) + at(i)));
    };
    values(x[i], v), values(there(g.weight), w);
#pragma unroll
    for (int j = 0; j < V; ++j) v[j] = (v[j] - mean) * inverse * w[j];
    if (g.shift != nullptr) {
      values(there(g.shift), w);
#pragma unroll
      for (int j = 0; j < V; ++j) v[j] += w[j];
    }
    store_vec<T, V>(reinterpret_cast<T*>(&x[i]), v);
  }
}

/// The residual of the element that a thread stores of a turn whose rows have kSegments sums each and whose
/// rows of x are 8 / kSegments: asked for before the sums are there, for it comes from the L2 cache.
template <class T, int kSegments>
__device__ __forceinline__ float gemv_residual(const GemvArgs& p, int row0, int rows) {
  const int i = threadIdx.x, n = row0 + i / 8, m = i % 8 / kSegments;
  if (p.plain || p.epilogue.residual == nullptr || i % kSegments != 0 || i >= rows * 8 || n >= p.n ||
      m >= p.m) {
    return 0.0f;
  }
  const auto* at = static_cast<const std::uint16_t*>(p.epilogue.residual) +
                   m * p.epilogue.residual_pitch + n;
  const std::uint16_t bits = __ldcg(at);
  return to_float(*reinterpret_cast<const T*>(&bits));
}
/// An element from its product and its residual.
template <class T>
__device__ __forceinline__ float gemv_value(const GemvArgs& p, float v, int m, int n, float residual) {
  if (p.plain) return v;
  EpilogueArgs e = p.epilogue;
  e.residual = nullptr;
  return epilogue_value<T>(e, v, 0, m, n) + residual;
}

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

/// a times b, in pairs.
template <class T>
__device__ __forceinline__ std::uint32_t gemv_times(std::uint32_t a, std::uint32_t b) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  const Pair out = __hmul2(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
  return *reinterpret_cast<const std::uint32_t*>(&out);
}

/// 16 bytes of x times those of the norm's weight; adds the squares of x.
template <class T>
__device__ __forceinline__ uint4 gemv_normed(const GemvGroupArgs& g, uint4 x, uint4 weight,
                                             float& squares) {
  float a[kVec<T>], w[kVec<T>];
  load_vec<T, kVec<T>>(reinterpret_cast<const T*>(&x), a);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) squares += a[i] * a[i];
  if (g.weight_offset == 0.0f) {  // the same, in fewer instructions: x is there now
    return {gemv_times<T>(x.x, weight.x), gemv_times<T>(x.y, weight.y), gemv_times<T>(x.z, weight.z),
            gemv_times<T>(x.w, weight.w)};
  }
  load_vec<T, kVec<T>>(reinterpret_cast<const T*>(&weight), w);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) a[i] *= w[i] + g.weight_offset;
  uint4 out;
  store_vec<T, kVec<T>>(reinterpret_cast<T*>(&out), a);
  return out;
}

/// Stores the element of row `row` of the turn from row0 on, against row m of x; u: what gates it.
template <class T>
__device__ __forceinline__ void gemv_group_store(const GemvArgs& p, const GemvGroupArgs& g, float v, float u,
                                                 int row0, int row, int m) {
  const bool gated = g.gated != 0;
  const int part = gated ? 0 : gemv_part(g, row0);
  const int n = (gated ? row0 / 2 : row0 - g.first[part]) + row;
  if (g.bias[part]) v += to_float(static_cast<const T*>(g.bias[part])[n]);
  v = activate<true>(g.activation, v, 0.0f);
  if (gated) v *= u;
  const std::int64_t at = n + m * std::int64_t{gated ? p.n / 2 : gemv_part_rows(p, g, part)};
  if (g.residual) v += to_float(static_cast<const T*>(g.residual)[at]);
  static_cast<T*>(g.y[part])[at] = from_float<T>(v);
}

/// The elements of a turn's rows. all: every warp's sums, `pitch` apart, eight a row: those of kSegments
/// pieces of each row of x. squares: of a row of x those of every warp.
template <class T, int kRows, int kWarps, int kSegments = 8>
__device__ __forceinline__ void gemv_group_finish(const GemvArgs& p, const GemvGroupArgs& g,
                                                  const float* squares, const float* all, int pitch,
                                                  int row0, int have) {
  const int i = threadIdx.x, m = i % 8 / kSegments;
  if (i >= kRows * 8 && i >= 32) return;
  const bool gated = g.gated != 0;
  const int rows = gated ? kRows / 2 : kRows;
  float v = 0.0f, u = 0.0f;
  for (int k = 0; k < kWarps && i < rows * 8; ++k) {
    v += all[k * pitch + i];
    if (gated) u += all[k * pitch + rows * 8 + i];
  }
#pragma unroll
  for (int k = 1; k < kSegments; k <<= 1) {
    v += __shfl_xor_sync(0xffffffffu, v, k);
    u += __shfl_xor_sync(0xffffffffu, u, k);
  }
  if (i % kSegments != 0 || i / 8 >= (gated ? have / 2 : have) || m >= p.m) return;
  if (g.norm != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kWarps; ++k) sum += squares[m * kWarps + k];
    const float inverse = rsqrtf(sum / static_cast<float>(p.k) + g.eps);
    v *= inverse, u *= inverse;
  }
  gemv_group_store<T>(p, g, v, u, row0, i / 8, m);
}

}  // namespace rm::cuda_ops
