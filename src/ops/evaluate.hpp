// Runs a whole static graph by reference evaluation: the oracle of passes, plans and kernels.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ir/graph.hpp"
#include "ops/host_tensor.hpp"

namespace rm::ops {

using WeightMap = std::map<std::string, HostTensor, std::less<>>;

/// Inputs in graph order; returns the outputs in graph order. Throws rm::Error when a type is
/// symbolic, an input or weight is missing or has another type, or a node has no reference.
std::vector<HostTensor> evaluate(const ir::Graph& graph, const std::vector<HostTensor>& inputs,
                                 const WeightMap& weights = {});
/// One node on host operands (null: absent).
std::vector<HostTensor> evaluate_node(const ir::Graph& graph, const ir::Node& node,
                                      const std::vector<const HostTensor*>& operands);

}  // namespace rm::ops
