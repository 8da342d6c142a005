// Every pass, in pipeline order. Each leaves a valid graph that computes the same outputs.
#pragma once

#include "passes/pass.hpp"

namespace rm::passes {

/// Checks every written type against the operators' inference.
void infer(ir::Graph& graph, const PassContext& context);
/// One form for one meaning: no-op views and arithmetic dropped, views composed, masks and index
/// lookups by ranges turned into views and constants, broadcasts left to their consumers.
void canonicalise(ir::Graph& graph, const PassContext& context);
/// Evaluates nodes of literals with small static results. Weights are never folded.
void fold(ir::Graph& graph, const PassContext& context);
/// Equal nodes, literals and weights become one.
void cse(ir::Graph& graph, const PassContext& context);
/// x * rsqrt(mean(x^2) + eps) * weight, casts included -> rms_norm.
void fuse_norm(ir::Graph& graph, const PassContext& context);
/// Composed GELU and SiLU -> gelu_tanh, gelu, silu.
void fuse_activation(ir::Graph& graph, const PassContext& context);
/// x * cos + rotate_half(x) * sin -> rope.
void fuse_rope(ir::Graph& graph, const PassContext& context);
/// Attention written out -> sdpa; repeated key/value heads -> grouped queries; range masks ->
/// is_causal.
void fuse_sdpa(ir::Graph& graph, const PassContext& context);
/// The logarithm of one class of a softmax -> cross_entropy, for devices that have it.
void fuse_loss(ir::Graph& graph, const PassContext& context);
/// Linears of one operand -> one linear on concatenated weights, and slices. Not in programs that
/// own a cache (donated inputs): generation reads its weights where they lie. Nor in programs that
/// quantise: all programs of a model then share one quantised form of each weight.
void merge_linear(ir::Graph& graph, const PassContext& context);
/// Products of merged weights whose result is read in its pieces alone become one a weight again:
/// what they compute before the merged weight exists. Whether there were any.
bool part_products(ir::Graph& graph);
/// linear and matmul with their bias, activation and residual -> gemm.
void fuse_gemm(ir::Graph& graph, const PassContext& context);
/// Batch norm into the convolution in front of it, then its bias, residual and activation.
void fuse_conv(ir::Graph& graph, const PassContext& context);
/// add + norm -> norm with residual; the sum is its second result when used elsewhere.
void fuse_residual_norm(ir::Graph& graph, const PassContext& context);
/// Trees of elementwise nodes -> ewise programs.
void fuse_ewise(ir::Graph& graph, const PassContext& context);
/// Products with constant weights on 8 or 4 bits, when the context asks for it (quantize.hpp).
void quantize(ir::Graph& graph, const PassContext& context);
/// Masks that end at one key -> `last` of sdpa; for devices whose kernels read that many keys only.
void bound_attention(ir::Graph& graph);
/// Drops what no output needs and renumbers.
void dce(ir::Graph& graph, const PassContext& context);

}  // namespace rm::passes
