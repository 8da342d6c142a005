// Lookup of operators by name, and the type check of a whole graph.
#pragma once

#include <span>
#include <string_view>

#include "ops/op_def.hpp"

namespace rm::ops {

/// nullptr when there is no such operator; every "aten.*" name finds the opaque record.
const OpDef* find(std::string_view op);
/// Throws rm::Error(RM_UNIMPLEMENTED) naming the operator.
const OpDef& get(std::string_view op);
std::span<const OpDef* const> all();

/// Checks the arity, then the operator's own rules. Returns what the results should be.
std::vector<ir::TensorType> infer(const ir::Graph& graph, const ir::Node& node);
/// Recomputes every type and compares it with what is written. Symbolic dims pass unless they are
/// provably different. Throws rm::Error naming the node.
void infer_and_check(const ir::Graph& graph);

/// Flops and bytes of one node (static types).
Cost cost(const ir::Graph& graph, const ir::Node& node);

}  // namespace rm::ops
