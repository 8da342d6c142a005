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
  int mask_is_bool, lengths_are_64, causal, splits, cluster;
  int early;   // the launch overlaps the stream's previous kernel
  int stable;  // k and v, but for a step's own row, were there before the kernels that it may overlap
  int span;    // tiles of a block that holds all its keys at once
  int lengths_step, lengths_more;  // from a batch's length to the next one's; what is added to it
  float scale;
};

/// A step of decoding: q is not rotated yet, and the key and the value of one position are not in the
/// caches k and v.
struct SdpaStepArgs {
  const void *cos, *sin;  // null: q and k are not rotated
  const void *k, *v, *position;
  void *k_cache, *v_cache;  // SdpaArgs' k and v
  std::int64_t cos_batch, sin_batch, k_batch, k_head, v_batch, v_head;
  int position_is_64;
};

/// A step whose q and key are as they should be: no angles.
struct SdpaPlainStepArgs : SdpaStepArgs {};

/// The gradient's: f as above, with o and lse read; delta: sum of d_o o of each row, [B, H, S].
struct SdpaGradArgs {
  SdpaArgs f;
  const void* d_o;
  void *dq, *dk, *dv;
  float* delta;
  int vectors;  // q, k, v, d_o have rows of whole 16-byte pieces
  std::int64_t d_o_batch, d_o_head, d_o_row, dq_batch, dq_head, dq_row;
  std::int64_t dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row;
};

}  // namespace rm::cuda_ops
