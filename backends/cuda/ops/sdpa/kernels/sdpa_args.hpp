// What the sdpa kernels are launched with. Strides are in elements.
#pragma once

#include <cstdint>

namespace rm::cuda_ops {

struct SdpaArgs {
  const void *q, *k, *v, *mask, *lengths;
  void* o;
  float* lse;
  float* partial;  // split kernels: [B*G, splits, 16, D + 2]: sums, then maximum and total
  std::int64_t q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row;
  std::int64_t o_batch, o_head, o_row;
  std::int64_t mask_batch, mask_head, mask_row, mask_column;
  std::int64_t causal_offset;
  int batch, heads, groups, rows, keys, dim, ratio;  // ratio: heads / groups
  int mask_is_bool, lengths_are_64, causal, splits;
  float scale;
};

}  // namespace rm::cuda_ops
