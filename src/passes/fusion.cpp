// The fusion passes as lists of rules; see rules/. Rules of one list feed each other.
#include "passes/passes.hpp"
#include "passes/rules/rules.hpp"

namespace rm::passes {

void fuse_norm(ir::Graph& graph, const PassContext&) {
  Rewriter::run(graph, {rms_norm_of_parts, rms_norm_takes_casts, rms_norm_takes_weight_offset,
                        rms_norm_takes_weight});
}

void fuse_activation(ir::Graph& graph, const PassContext&) {
  Rewriter::run(graph, {gelu_tanh_of_parts, gelu_of_parts, silu_of_parts});
}

void fuse_rope(ir::Graph& graph, const PassContext&) { Rewriter::run(graph, {rope_of_parts}); }

void fuse_sdpa(ir::Graph& graph, const PassContext&) {
  Rewriter::run(
      graph, {sdpa_of_parts, sdpa_groups_queries, sdpa_drops_open_mask, sdpa_range_mask_is_causal});
}

void fuse_loss(ir::Graph& graph, const PassContext&) {
  Rewriter::run(graph, {cross_entropy_of_parts});
}

void fuse_gemm(ir::Graph& graph, const PassContext&) {
  Rewriter::run(graph, {matmul_of_one_term_is_mul, linear_is_gemm, matmul_is_gemm,
                        gemm_between_reshapes, gemm_takes_bias, gemm_takes_activation,
                        gemm_takes_residual});
}

void fuse_conv(ir::Graph& graph, const PassContext&) {
  Rewriter::run(graph, {conv_takes_scale, conv_takes_bias, conv_takes_residual,
                        conv_takes_activation, conv_takes_hardswish, group_norm_takes_silu});
}

void fuse_residual_norm(ir::Graph& graph, const PassContext&) {
  Rewriter::run(graph, {norm_takes_residual, norm_backward_takes_sum});
}

void fuse_ewise(ir::Graph& graph, const PassContext&) {
  Rewriter::run(graph, {concat_of_one_value_is_repeat, ewise_before_repeat});
  Rewriter::run(graph, {ewise_takes_operands});
}

void bound_attention(ir::Graph& graph) {
  Rewriter::run(graph, {sdpa_range_mask_is_last_key});
}

}  // namespace rm::passes
