// Lookup of operators by name, and the type check of a whole graph.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "ops/op_def.hpp"

namespace rm::ops {

/// nullptr when there is no such operator; every "aten.*" name finds the opaque record.
const OpDef* find(std::string_view op);
/// Throws rm::Error(RM_UNIMPLEMENTED) naming the operator.
const OpDef& get(std::string_view op);
std::span<const OpDef* const> all();

/// The effects of the node's operator. An opaque node that says so (attribute `pure` = 1, written by
/// an importer that knows the operator) has none; an unknown operator may do anything.
Effects effects(const ir::Node& node);
inline bool is_pure(const ir::Node& node) { return effects(node) == Effects::kNone; }
/// By value: 1 for weights, literals and what pure nodes compute from such alone.
std::vector<char> constant_values(const ir::Graph& graph);
/// True when the node is pure and `is_constant(v)` holds for each of its operands.
template <class F>
bool is_constant(const ir::Node& node, F&& is_constant_value) {
  if (!is_pure(node)) return false;
  for (ir::ValueId v : node.operands) {
    if (v != ir::kNoValue && !is_constant_value(v)) return false;
  }
  return true;
}

/// Checks the arity, then the operator's own rules. Returns what the results should be.
std::vector<ir::TensorType> infer(const ir::Graph& graph, const ir::Node& node);
/// Recomputes every type and compares it with what is written. Symbolic dims pass unless they are
/// provably different. Throws rm::Error naming the node.
void infer_and_check(const ir::Graph& graph);

/// Flops and bytes of one node (static types).
Cost cost(const ir::Graph& graph, const ir::Node& node);

}  // namespace rm::ops
