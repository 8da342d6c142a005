// Structural rules of a graph, as a table; operator rules live in ops (ops/registry.hpp).
#pragma once

#include "ir/graph.hpp"

namespace rm::ir {

/// Throws rm::Error(RM_INTERNAL) naming the rule and the node that breaks it.
void verify(const Graph& graph);

}  // namespace rm::ir
