// Elements as integers of their size: 16-byte pieces, 32 x 32 tiles through shared memory where x's
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

/// y is dense along the walk's last axis, x along axis `a`; blocks of 32 x 8 threads.
template <class E>
__global__ void __launch_bounds__(256) copy_tiles(const Walk<2> w, int a, const E* x, E* y) {
  __shared__ E tile[32][33];
  const int last = w.rank - 1;
  const std::int64_t tiles_a = (w.shape[a] + 31) / 32, tiles_l = (w.shape[last] + 31) / 32;
  std::int64_t rest = blockIdx.x;
  const std::int64_t l0 = rest % tiles_l * 32, a0 = rest / tiles_l % tiles_a * 32;
  rest /= tiles_l * tiles_a;
  std::int64_t from = 0, to = 0;
  for (int d = last - 1; d >= 0; --d) {
    if (d == a) continue;
    from += rest % w.shape[d] * w.stride[0][d];
    to += rest % w.shape[d] * w.stride[1][d];
    rest /= w.shape[d];
  }
  for (int i = threadIdx.y; i < 32; i += 8) {
    const std::int64_t l = l0 + i, k = a0 + threadIdx.x;
    if (l < w.shape[last] && k < w.shape[a]) tile[i][threadIdx.x] = x[from + l * w.stride[0][last] + k];
  }
  __syncthreads();
  for (int i = threadIdx.y; i < 32; i += 8) {
    const std::int64_t k = a0 + i, l = l0 + threadIdx.x;
    if (l < w.shape[last] && k < w.shape[a]) y[to + k * w.stride[1][a] + l] = tile[threadIdx.x][i];
  }
}

}  // namespace rm::cuda_ops
