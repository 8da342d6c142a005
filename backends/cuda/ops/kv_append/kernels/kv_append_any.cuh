// A thread moves one E (16 bytes, or an element) of k and of v. Bound: launch, or memory.
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
  const std::int64_t total = static_cast<std::int64_t>(p.batch) * p.groups * p.rows * p.per_row;
  const std::int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= total) return;
  const std::int64_t row = i / p.per_row, d = i - row * p.per_row, image = row / p.rows;
  const std::int64_t s = row - image * p.rows, b = image / p.groups, g = image - b * p.groups;
  const auto offset = [&](int t, std::int64_t slot) {
    return b * p.stride[t][0] + g * p.stride[t][1] + slot * p.stride[t][2] + d;
  };
  const E k = static_cast<const E*>(p.k)[offset(0, s)];  // before the position is known
  const E v = static_cast<const E*>(p.v)[offset(1, s)];
  const std::int64_t start = p.wide_positions ? static_cast<const std::int64_t*>(p.positions)[b]
                                              : static_cast<const std::int32_t*>(p.positions)[b];
  const std::int64_t at = start + s;
  if (at < 0 || at >= p.slots) return;
  static_cast<E*>(p.k_cache)[offset(2, at)] = k;
  static_cast<E*>(p.v_cache)[offset(3, at)] = v;
}

}  // namespace rm::cuda_ops
