// The rewriting rules by theme. Each returns true when it replaced the node (see rewriter.hpp).
#pragma once

#include "passes/rewriter.hpp"

namespace rm::passes {

// view_rules.cpp
bool drop_identity_view(Rewriter& rw, const ir::Node& node);
bool compose_reshapes(Rewriter& rw, const ir::Node& node);
bool compose_permutes(Rewriter& rw, const ir::Node& node);
bool compose_slices(Rewriter& rw, const ir::Node& node);
bool compose_expands(Rewriter& rw, const ir::Node& node);
bool permute_of_ones_is_reshape(Rewriter& rw, const ir::Node& node);
bool view_of_splat_is_full(Rewriter& rw, const ir::Node& node);
bool simplify_concat(Rewriter& rw, const ir::Node& node);
bool slice_of_concat(Rewriter& rw, const ir::Node& node);
bool leave_broadcast_to_consumer(Rewriter& rw, const ir::Node& node);
bool concat_of_one_value_is_repeat(Rewriter& rw, const ir::Node& node);

// concat_rules.cpp
bool sum_of_frames_is_concat(Rewriter& rw, const ir::Node& node);

// algebra_rules.cpp
bool drop_identity_arithmetic(Rewriter& rw, const ir::Node& node);
bool drop_identity_logic(Rewriter& rw, const ir::Node& node);
bool drop_true_check(Rewriter& rw, const ir::Node& node);
bool square_is_product(Rewriter& rw, const ir::Node& node);
bool constant_operand_second(Rewriter& rw, const ir::Node& node);
bool compose_casts(Rewriter& rw, const ir::Node& node);
bool where_of_constant(Rewriter& rw, const ir::Node& node);

// range_rules.cpp
bool compare_ranges(Rewriter& rw, const ir::Node& node);
bool compare_bounds(Rewriter& rw, const ir::Node& node);
bool all_of_constant(Rewriter& rw, const ir::Node& node);
bool index_by_ranges_is_view(Rewriter& rw, const ir::Node& node);
bool sum_of_iota_is_iota(Rewriter& rw, const ir::Node& node);
bool cumsum_of_zeros_is_zero(Rewriter& rw, const ir::Node& node);

// norm_rules.cpp
bool rms_norm_of_parts(Rewriter& rw, const ir::Node& node);
bool rms_norm_takes_weight(Rewriter& rw, const ir::Node& node);
bool rms_norm_takes_casts(Rewriter& rw, const ir::Node& node);
bool rms_norm_takes_weight_offset(Rewriter& rw, const ir::Node& node);
bool norm_takes_residual(Rewriter& rw, const ir::Node& node);
bool norm_backward_takes_sum(Rewriter& rw, const ir::Node& node);

// activation_rules.cpp
bool gelu_tanh_of_parts(Rewriter& rw, const ir::Node& node);
bool gelu_of_parts(Rewriter& rw, const ir::Node& node);
bool silu_of_parts(Rewriter& rw, const ir::Node& node);

// loss_rules.cpp
bool cross_entropy_of_parts(Rewriter& rw, const ir::Node& node);

// attention_rules.cpp
bool rope_of_parts(Rewriter& rw, const ir::Node& node);
bool sdpa_of_parts(Rewriter& rw, const ir::Node& node);
bool sdpa_groups_queries(Rewriter& rw, const ir::Node& node);
bool sdpa_drops_open_mask(Rewriter& rw, const ir::Node& node);
bool sdpa_range_mask_is_causal(Rewriter& rw, const ir::Node& node);
bool sdpa_range_mask_is_last_key(Rewriter& rw, const ir::Node& node);

// gemm_rules.cpp
bool linear_is_gemm(Rewriter& rw, const ir::Node& node);
bool matmul_of_one_term_is_mul(Rewriter& rw, const ir::Node& node);
bool matmul_is_gemm(Rewriter& rw, const ir::Node& node);
bool gemm_takes_bias(Rewriter& rw, const ir::Node& node);
bool gemm_takes_activation(Rewriter& rw, const ir::Node& node);
bool gemm_takes_residual(Rewriter& rw, const ir::Node& node);
bool gemm_between_reshapes(Rewriter& rw, const ir::Node& node);

// conv_rules.cpp
bool conv_takes_scale(Rewriter& rw, const ir::Node& node);
bool conv_takes_bias(Rewriter& rw, const ir::Node& node);
bool conv_takes_residual(Rewriter& rw, const ir::Node& node);
bool conv_takes_activation(Rewriter& rw, const ir::Node& node);
bool conv_takes_hardswish(Rewriter& rw, const ir::Node& node);
bool group_norm_takes_silu(Rewriter& rw, const ir::Node& node);

// ewise_rules.cpp
bool ewise_takes_operands(Rewriter& rw, const ir::Node& node);
bool ewise_before_repeat(Rewriter& rw, const ir::Node& node);

}  // namespace rm::passes
