// A thread moves one E (16 bytes, or an element) of k or of v. Bound: launch, or memory.
#pragma once

#include <cstdint>

namespace rm::cuda_ops {

struct KvAppendArgs {
  const void *k, *v, *positions;
  void *k_cache, *v_cache;
  std::int64_t stride[4][3];  // B, G, S of k, v, k_cache, v_cache, in E's
  int batch, groups, rows, slots, per_row;
  bool wide_positions;
};

template <class E>
__global__ void __launch_bounds__(256) kv_append_rows_any(const KvAppendArgs p) {
  const std::int64_t each = static_cast<std::int64_t>(p.batch) * p.groups * p.rows * p.per_row;
  std::int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= 2 * each) return;
  const bool value = i >= each;
  if (value) i -= each;
  const std::int64_t d = i % p.per_row, row = i / p.per_row;
  const std::int64_t s = row % p.rows, g = row / p.rows % p.groups, b = row / p.rows / p.groups;
  const std::int64_t start = p.wide_positions ? static_cast<const std::int64_t*>(p.positions)[b]
                                              : static_cast<const std::int32_t*>(p.positions)[b];
  const std::int64_t at = start + s;
  if (at < 0 || at >= p.slots) return;
  const std::int64_t* from = p.stride[value ? 1 : 0];
  const std::int64_t* to = p.stride[value ? 3 : 2];
  static_cast<E*>(value ? p.v_cache : p.k_cache)[b * to[0] + g * to[1] + at * to[2] + d] =
      static_cast<const E*>(value ? p.v : p.k)[b * from[0] + g * from[1] + s * from[2] + d];
}

}  // namespace rm::cuda_ops
