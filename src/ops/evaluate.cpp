// The reference interpreter: every value is kept, nothing is reused.
#include "ops/evaluate.hpp"

#include "base/error.hpp"
#include "ops/registry.hpp"

namespace rm::ops {
namespace {

void check_type(const std::string& what, const ir::TensorType& expected, const HostTensor& given) {
  if (given.type != expected || static_cast<int64_t>(given.bytes.size()) != expected.num_bytes()) {
    throw_invalid("[evaluate] expected " + what + " of type " + expected.str() + ", got " +
                  given.type.str() + " with " + std::to_string(given.bytes.size()) + " bytes");
  }
}

}  // namespace

std::vector<HostTensor> evaluate_node(const ir::Graph& graph, const ir::Node& node,
                                      const std::vector<const HostTensor*>& operands) {
  std::vector<ir::TensorType> results;
  for (ir::ValueId v : node.results) results.push_back(graph.type(v));
  return get(node.op).reference(node, operands, results);
}

std::vector<HostTensor> evaluate(const ir::Graph& graph, const std::vector<HostTensor>& inputs,
                                 const WeightMap& weights) {
  if (inputs.size() != graph.inputs().size()) {
    throw_invalid("[evaluate] expected " + std::to_string(graph.inputs().size()) + " inputs, got " +
                  std::to_string(inputs.size()));
  }
  std::vector<HostTensor> values(graph.num_values());
  for (size_t i = 0; i < graph.num_values(); ++i) {
    const ir::Value& value = graph.value(static_cast<ir::ValueId>(i));
    if (value.kind == ir::ValueKind::kLiteral) values[i] = {value.type, value.literal};
    if (value.kind != ir::ValueKind::kWeight) continue;
    auto it = weights.find(value.name);
    if (it == weights.end())
      throw_invalid("[evaluate] expected weight '" + value.name + "', got none");
    check_type("weight '" + value.name + "'", value.type, it->second);
    values[i] = it->second;
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    ir::ValueId v = graph.inputs()[i];
    check_type("input '" + graph.value(v).name + "'", graph.type(v), inputs[i]);
    values[static_cast<size_t>(v)] = inputs[i];
  }
  for (const ir::Node& node : graph.nodes) {
    std::vector<const HostTensor*> operands;
    for (ir::ValueId v : node.operands) {
      operands.push_back(v == ir::kNoValue ? nullptr : &values[static_cast<size_t>(v)]);
    }
    std::vector<HostTensor> results = evaluate_node(graph, node, operands);
    for (size_t r = 0; r < results.size(); ++r) {
      values[static_cast<size_t>(node.results[r])] = std::move(results[r]);
    }
  }
  std::vector<HostTensor> outputs;
  for (ir::ValueId v : graph.outputs) outputs.push_back(values[static_cast<size_t>(v)]);
  return outputs;
}

}  // namespace rm::ops
