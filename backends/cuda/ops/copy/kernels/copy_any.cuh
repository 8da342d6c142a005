// Elements as integers of their size: 16-byte pieces (several copies a launch), and where x's dense
// axis is not y's, blocks turned in registers or 64 x 64 tiles through shared memory, or one by
// one. Bound: memory.
#pragma once

#include "_shim/divide_shim.hpp"
#include "_shim/launch_shim.hpp"
#include "_shim/walk_shim.hpp"

namespace rm::cuda_ops {

/// A walk over less than 2^31 steps: no division on the device.
struct CopyWalk {
  int rank = 0;
  std::uint32_t total = 0;
  FastDivisor by[kMaxRank];
  std::int64_t stride[2][kMaxRank] = {};
};

struct CopyPart {
  const void* x;
  void* y;
  CopyWalk walk;
};
inline constexpr int kCopyParts = 8;  // of a launch
template <int kParts>
struct CopyParts {
  std::uint32_t first_block[kParts];  // of each part
  int parts;
  CopyPart part[kParts];
};

/// E: what a thread moves at a time. The walks are over E's.
template <class E, int kParts>
__global__ void __launch_bounds__(256)
    copy_elements(const __grid_constant__ CopyParts<kParts> all) {
  constexpr int kUnroll = 4;
  int k = 0;
  if constexpr (kParts > 1) {
    while (k + 1 < all.parts && all.first_block[k + 1] <= blockIdx.x) ++k;
  }
  const CopyWalk& w = all.part[k].walk;
  const std::uint32_t first = (blockIdx.x - all.first_block[k]) * 256 * kUnroll + threadIdx.x;
  std::uint32_t index[kUnroll];
  std::int64_t from[kUnroll] = {}, to[kUnroll] = {};
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) index[u] = first + u * 256;
  for (int d = w.rank - 1; d > 0; --d) {
    const FastDivisor by = w.by[d];
    const std::int64_t step_x = w.stride[0][d], step_y = w.stride[1][d];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const std::uint32_t rest = by.quotient(index[u]), at = index[u] - rest * by.d;
      from[u] += at * step_x, to[u] += at * step_y;
      index[u] = rest;
    }
  }
  const E* x = static_cast<const E*>(all.part[k].x);
  E* y = static_cast<E*>(all.part[k].y);
  overlap_begin(x, y);
  E value[kUnroll];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * 256 < w.total) value[u] = x[from[u] + index[u] * w.stride[0][0]];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    if (first + u * 256 < w.total) y[to[u] + index[u] * w.stride[1][0]] = value[u];
  }
}

/// The same over any number of elements.
template <class E>
__global__ void __launch_bounds__(256) copy_many_elements(const Walk<2> w, const E* x, E* y) {
  overlap_begin();
  const std::int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= w.total) return;
  std::int64_t at[2];
  walk_offsets(w, i, at);
  y[at[1]] = x[at[0]];
}

struct CopyTurn {
  const std::uint16_t* x;
  std::uint16_t* y;
  std::uint32_t size_a, size_l;  // of x's dense axis and of y's
  std::int64_t x_step, y_step;   // of x along y's dense axis, of y along x's
  FastDivisor tiles_a, tiles_l;
  CopyWalk outer;  // the other axes
};

/// out[j].v[i] = in[i].v[j] of 16-bit elements.
__device__ __forceinline__ void turn_block(const uint4 (&in)[8], uint4 (&out)[8]) {
  const auto word = [](const uint4& v, int k) {
    return k == 0 ? v.x : k == 1 ? v.y : k == 2 ? v.z : v.w;
  };
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    std::uint32_t pair[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      pair[q] = __byte_perm(word(in[2 * q], j / 2), word(in[2 * q + 1], j / 2),
                            j % 2 == 0 ? 0x5410 : 0x7632);
    }
    out[j] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }
}

/// 8 lanes of a warp along x's dense axis, 4 along y's, 8 elements each; 4 x 2 warps a block.
inline constexpr int kTurnA = 4 * 8 * 8, kTurnL = 2 * 4 * 8;

/// x dense along an axis, y along another: a thread turns 8 x 8 elements of two bytes in registers.
__global__ void __launch_bounds__(256) copy_turned(const __grid_constant__ CopyTurn p) {
  overlap_begin();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  std::uint32_t rest = p.tiles_l.quotient(blockIdx.x);
  const std::uint32_t tile_l = blockIdx.x - rest * p.tiles_l.d;
  const std::uint32_t outer = p.tiles_a.quotient(rest), tile_a = rest - outer * p.tiles_a.d;
  const std::uint32_t a = tile_a * kTurnA + (warp % 4 * 8 + lane % 8) * 8;
  const std::uint32_t l = tile_l * kTurnL + (warp / 4 * 4 + lane / 8) * 8;
  if (a >= p.size_a || l >= p.size_l) return;
  const std::uint16_t* x = p.x + a + l * p.x_step;
  std::uint16_t* y = p.y + l + a * p.y_step;
  rest = outer;
  for (int d = p.outer.rank - 1; d >= 0; --d) {
    const std::uint32_t left = p.outer.by[d].quotient(rest), at = rest - left * p.outer.by[d].d;
    x += at * p.outer.stride[0][d], y += at * p.outer.stride[1][d];
    rest = left;
  }
  uint4 in[8], out[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) in[i] = *reinterpret_cast<const uint4*>(x + i * p.x_step);
  turn_block(in, out);
#pragma unroll
  for (int j = 0; j < 8; ++j) *reinterpret_cast<uint4*>(y + j * p.y_step) = out[j];
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
  overlap_begin(x, y);
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
