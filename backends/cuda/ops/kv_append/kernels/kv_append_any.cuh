// A thread moves some E (16 bytes, or an element) of k and of v. Bound: launch, or memory.
#pragma once

#include <cstdint>

#include "_shim/divide_shim.hpp"

namespace rm::cuda_ops {

struct KvAppendArgs {
  const void *k, *v, *positions;
  void *k_cache, *v_cache;
  std::int64_t stride[4][3];  // B, G, S of k, v, k_cache, v_cache, in E's
  int first, total, slots;    // the first image of B; E's of this launch, below 2^31
  FastDivisor by_row, by_rows, by_groups;
  bool wide_positions;
};

inline constexpr int kKvAppendPacks = 2;  // a thread's E's of each tensor

template <class E>
__global__ void __launch_bounds__(256) kv_append_rows_any(const KvAppendArgs p) {
  const auto first =
      static_cast<int>(blockIdx.x) * 256 * kKvAppendPacks + static_cast<int>(threadIdx.x);
  E k[kKvAppendPacks], v[kKvAppendPacks];
  std::int64_t k_to[kKvAppendPacks], v_to[kKvAppendPacks];
  int image[kKvAppendPacks], slot[kKvAppendPacks];
#pragma unroll
  for (int u = 0; u < kKvAppendPacks; ++u) {  // before the positions are known
    const int i = first + u * 256;
    image[u] = -1;
    if (i >= p.total) break;
    const std::uint32_t row = p.by_row.quotient(i), d = i - row * p.by_row.d;
    const std::uint32_t line = p.by_rows.quotient(row), s = row - line * p.by_rows.d;
    const std::uint32_t n = p.by_groups.quotient(line), g = line - n * p.by_groups.d;
    const auto offset = [&](int t) {
      return (p.first + n) * p.stride[t][0] + g * p.stride[t][1] + d;
    };
    k[u] = static_cast<const E*>(p.k)[offset(0) + s * p.stride[0][2]];
    v[u] = static_cast<const E*>(p.v)[offset(1) + s * p.stride[1][2]];
    k_to[u] = offset(2), v_to[u] = offset(3);
    image[u] = static_cast<int>(p.first + n), slot[u] = static_cast<int>(s);
  }
#pragma unroll
  for (int u = 0; u < kKvAppendPacks; ++u) {
    if (image[u] < 0) break;
    const std::int64_t start = p.wide_positions
                                   ? static_cast<const std::int64_t*>(p.positions)[image[u]]
                                   : static_cast<const std::int32_t*>(p.positions)[image[u]];
    const std::int64_t at = start + slot[u];
    if (at < 0 || at >= p.slots) continue;
    static_cast<E*>(p.k_cache)[k_to[u] + at * p.stride[2][2]] = k[u];
    static_cast<E*>(p.v_cache)[v_to[u] + at * p.stride[3][2]] = v[u];
  }
}

}  // namespace rm::cuda_ops
