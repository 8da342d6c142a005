// Elements as integers of their size: 16-byte pieces, 64 x 64 tiles through shared memory where x's
// dense axis is not y's, or one by one.
#pragma once

#include "_shim/walk_shim.hpp"

namespace rm::cuda_ops {

/// E: what a thread moves at a time. The walk is over E's.
template <class E>
__global__ void __launch_bounds__(256) copy_elements(const Walk<2> w, const E* x, E* y) {
  constexpr int kUnroll = 4;
  const std::int64_t first = blockIdx.x * 256ll * kUnroll + threadIdx.x;
  E value[kUnroll];
  std::int64_t to[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * 256;
    if (i >= w.total) break;
    std::int64_t at[2];
    walk_offsets(w, i, at);
    value[u] = x[at[0]];
    to[u] = at[1];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * 256 < w.total) y[to[u]] = value[u];
  }
}

inline constexpr int kCopyTile = 64;

/// kV neighbouring elements, a power of two of bytes.
template <class E, int kV>
struct alignas(sizeof(E) * kV) CopyPack {
  E v[kV];
};

/// y is dense along the walk's last axis, x along axis `a`; tiles of 64 x 64, kV elements a load
/// and a store (kV > 1: both axes and all strides in whole packs).
template <class E, int kV>
__global__ void __launch_bounds__(256) copy_tiles(const Walk<2> w, int a, const E* x, E* y) {
  using P = CopyPack<E, kV>;
  // an odd number of 4-byte words a row, where elements are smaller than 8 bytes
  __shared__ E tile[kCopyTile][kCopyTile + (sizeof(E) < 4 ? 4 / sizeof(E) : 1)];
  constexpr int kAcross = kCopyTile / kV, kRows = 256 / kAcross;
  const int last = w.rank - 1, column = threadIdx.x % kAcross * kV, row0 = threadIdx.x / kAcross;
  const std::int64_t tiles_a = (w.shape[a] + kCopyTile - 1) / kCopyTile;
  const std::int64_t tiles_l = (w.shape[last] + kCopyTile - 1) / kCopyTile;
  std::int64_t rest = blockIdx.x;
  const std::int64_t l0 = rest % tiles_l * kCopyTile, a0 = rest / tiles_l % tiles_a * kCopyTile;
  rest /= tiles_l * tiles_a;
  std::int64_t from = 0, to = 0;
  for (int d = last - 1; d >= 0; --d) {
    if (d == a) continue;
    from += rest % w.shape[d] * w.stride[0][d];
    to += rest % w.shape[d] * w.stride[1][d];
    rest /= w.shape[d];
  }
  P pack[kCopyTile / kRows];
#pragma unroll
  for (int i = 0; i < kCopyTile / kRows; ++i) {
    const std::int64_t l = l0 + row0 + i * kRows, k = a0 + column;
    if (l < w.shape[last] && k < w.shape[a]) {
      pack[i] = *reinterpret_cast<const P*>(x + from + l * w.stride[0][last] + k);
    }
  }
#pragma unroll
  for (int i = 0; i < kCopyTile / kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kV; ++j) tile[row0 + i * kRows][column + j] = pack[i].v[j];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCopyTile / kRows; ++i) {
    const std::int64_t k = a0 + row0 + i * kRows, l = l0 + column;
    P out;
#pragma unroll
    for (int j = 0; j < kV; ++j) out.v[j] = tile[column + j][row0 + i * kRows];
    if (l < w.shape[last] && k < w.shape[a]) {
      *reinterpret_cast<P*>(y + to + k * w.stride[1][a] + l) = out;
    }
  }
}

}  // namespace rm::cuda_ops
