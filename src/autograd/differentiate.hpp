// Reverse-mode differentiation: appends the backward graph of a scalar to a static graph.
#pragma once

#include <vector>

#include "autograd/builder.hpp"
#include "ir/graph.hpp"

namespace rm::autograd {

/// The gradient of the scalar `loss` with respect to each of `wrt`, in its type; kNoValue where the
/// loss does not depend on it. Sums over several uses are added in the order of the uses.
/// Throws rm::Error(RM_UNIMPLEMENTED, "RM702") naming an operator on the way that has no rule, and
/// RM_INVALID_ARGUMENT when `loss` is no floating scalar or a type is symbolic.
/// `served`: operators of gradients that may be used; the rules have others for the rest.
std::vector<ir::ValueId> differentiate(ir::Graph& graph, ir::ValueId loss,
                                       const std::vector<ir::ValueId>& wrt,
                                       const Served& served = {});

}  // namespace rm::autograd
