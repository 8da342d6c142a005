// Solves the symbols of a graph's input types from concrete shapes.
#pragma once

#include <vector>

#include "ir/graph.hpp"
#include "ir/layout.hpp"

namespace rm::engine {

/// Values of all symbols, so that every input dim expression equals the concrete dim.
/// Throws rm::Error(RM_INVALID_ARGUMENT, "RM105") naming the input when none exists, when a value
/// leaves its symbol's range, or when a dtype or rank differs.
ir::Bindings bind_symbols(const ir::Graph& graph, const std::vector<ir::Layout>& inputs);

}  // namespace rm::engine
