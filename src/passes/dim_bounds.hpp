// Interval of a dim expression, from the declared ranges of its symbols.
#pragma once

#include "ir/graph.hpp"

namespace rm::passes {

/// As doubles: exact below 2^53, infinite beyond what is known.
struct DimBounds {
  double lo, hi;
};

DimBounds bounds(const ir::Dim& dim, const ir::Graph& graph);

/// True when every value of the symbols gives dim >= 0.
inline bool provably_nonnegative(const ir::Dim& dim, const ir::Graph& graph) {
  return bounds(dim, graph).lo >= 0;
}

}  // namespace rm::passes
