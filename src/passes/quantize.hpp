// Weight-only quantisation as a rewrite: products with constant weights become quant_linear on
// quantize(weight), a constant expression that is computed once a program.
//
// Only weights as the module holds them are quantised, transposed or joined by rows at most, so
// that anyone can compute the same from the module's own tensors (the parity gate does).
#pragma once

#include <string>
#include <vector>

#include "ir/graph.hpp"

namespace rm::passes {

/// What group_size=auto means (docs/decisions/0007-weight-only-quantisation.md).
/// On a GPU: docs/decisions/0161-quantised-weights-on-a-gpu.md.
constexpr int64_t auto_group(int64_t bits, bool gpu = false) { return bits == 8 || gpu ? 128 : 32; }

/// What activations=auto means (docs/decisions/0009-activations-of-8-bits.md).
constexpr int64_t auto_activations(int64_t) { return 8; }

struct QuantizeOptions {
  int64_t bits = 8;    // 8 or 4
  int64_t group = 32;  // elements of K that share a scale: 32, 64 or 128
  bool symmetric = true;
  int64_t least_elements = 1 << 14;  // smaller weights stay as they are
  int64_t activation_bits = 16;      // 16 or 8: what few rows of x are rounded to; 8 lays out tiles
  bool pairs = false;                // as GPUs read them: the operators' attribute
};

/// Applied to an optimised graph (after fuse_gemm). Leaves every other node alone, embeddings too.
/// Returns how many products were replaced. Throws rm::Error for options outside the operator's.
int64_t quantize_linears(ir::Graph& graph, const QuantizeOptions& options);

/// The graph with the same quantised weights and activations that are not rounded to 8 bits.
void keep_activations(ir::Graph& graph);

/// A weight of the graph that products read quantised.
struct QuantisedWeight {
  std::string name;
  int64_t bits, group;
  bool symmetric;
  bool transposed;  // it lies as [K, N]: groups run along its first axis
  bool pairs;       // its scales are of its own type, not f16
};

/// Every weight below a quantize node, once a form.
std::vector<QuantisedWeight> quantised_weights(const ir::Graph& graph);

}  // namespace rm::passes
