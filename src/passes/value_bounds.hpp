// Bounds of the elements of an integer value, from the nodes that make it.
#pragma once

#include <optional>

#include "passes/dim_bounds.hpp"
#include "passes/rewriter.hpp"

namespace rm::passes {

/// Every element of `v`, which is of integers or bool, lies between them; either may be infinite.
/// None where neither is known, and for floats.
std::optional<DimBounds> value_bounds(const Rewriter& rw, ir::ValueId v);

}  // namespace rm::passes
