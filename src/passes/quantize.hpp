// Weight-only quantisation as a rewrite: products with constant weights become quant_linear on
// quantize(weight), a constant expression that is computed once a program.
#pragma once

#include "ir/graph.hpp"

namespace rm::passes {

struct QuantizeOptions {
  int64_t bits = 8;    // 8 or 4
  int64_t group = 32;  // elements of K that share a scale: 32, 64 or 128
  bool symmetric = true;
  int64_t least_elements = 1 << 14;  // smaller weights stay as they are
};

/// Applied to an optimised graph (after fuse_gemm). Leaves every other node alone, embeddings too.
/// Returns how many products were replaced. Throws rm::Error for options outside the operator's.
int64_t quantize_linears(ir::Graph& graph, const QuantizeOptions& options);

}  // namespace rm::passes
