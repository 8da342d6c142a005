// Phases: a node's phase is the highest of its operands', raised by one where the side changes;
// even phases are the host's, odd ones the device's. All nodes of a phase are one part. A phase
// never falls along an edge, so the parts are convex, and there are as few changes of side as the
// longest alternating path has. An update of a donated input is moved to the phase that reads it,
// so that the tensor does not travel.
#include "partition/partition.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <string_view>

#include "base/error.hpp"
#include "ops/registry.hpp"

namespace rm::partition {
namespace {

constexpr std::array<std::string_view, 8> kViews = {"reshape", "permute", "expand", "bitcast",
                                                    "slice",   "iota",    "full",   "dim_value"};

bool computes(const ir::Node& node) {
  return std::find(kViews.begin(), kViews.end(), node.op) == kViews.end();
}

/// The donated input an update in place is for; kNoValue for any other node.
ir::ValueId updated_by(const ir::Graph& graph, const ir::Node& node) {
  const ops::OpDef* def = ops::find(node.op);
  if (def == nullptr || def->updates == ops::kNoOperand) return ir::kNoValue;
  const auto operand = static_cast<size_t>(def->updates);
  if (operand >= node.operands.size() || node.operands[operand] == ir::kNoValue) {
    return ir::kNoValue;
  }
  const ir::ValueId target = node.operands[operand];
  const ir::Value& value = graph.value(target);
  return value.kind == ir::ValueKind::kInput && value.donated ? target : ir::kNoValue;
}

/// Moves updates, and views of what they give, to the first phase that reads them.
void sink_updates(const ir::Graph& graph, const std::vector<bool>& on_device,
                  std::vector<int>& phases) {
  constexpr int kUnread = std::numeric_limits<int>::max();
  std::vector<bool> updated(graph.num_values(), false);
  std::vector<int> first_read(graph.num_values(), kUnread);
  for (const ir::Node& node : graph.nodes) {
    const bool view = !computes(node) && !node.operands.empty() &&
                      node.operands[0] != ir::kNoValue &&
                      updated[static_cast<size_t>(node.operands[0])];
    if (!view && updated_by(graph, node) == ir::kNoValue) continue;
    updated[static_cast<size_t>(node.results[0])] = true;
  }
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    const ir::Node& node = graph.nodes[i];
    const auto result = static_cast<size_t>(node.results[0]);
    const int reader = first_read[result];
    if (updated[result] && on_device[i] && reader != kUnread) {
      phases[i] = std::max(phases[i], reader % 2 == 1 ? reader : reader - 1);
    }
    for (const ir::ValueId id : node.operands) {
      if (id == ir::kNoValue) continue;
      int& read = first_read[static_cast<size_t>(id)];
      read = std::min(read, phases[i]);
    }
  }
}

std::vector<int> phases_of(const ir::Graph& graph, const std::vector<bool>& on_device) {
  std::vector<int> of_value(graph.num_values(), 0), of_node(graph.nodes.size(), 0);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    int phase = 0;
    for (const ir::ValueId id : graph.nodes[i].operands) {
      if (id != ir::kNoValue) phase = std::max(phase, of_value[static_cast<size_t>(id)]);
    }
    if ((phase % 2 == 1) != on_device[i]) ++phase;
    of_node[i] = phase;
    for (const ir::ValueId id : graph.nodes[i].results) of_value[static_cast<size_t>(id)] = phase;
  }
  sink_updates(graph, on_device, of_node);
  return of_node;
}

/// By donated input that stays on the device: its new value, which is read in one part only.
std::map<ir::ValueId, ir::ValueId> states_of(const ir::Graph& graph,
                                             const std::vector<int>& phases) {
  std::vector<std::vector<size_t>> readers(graph.num_values());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const ir::ValueId id : graph.nodes[i].operands) {
      if (id != ir::kNoValue) readers[static_cast<size_t>(id)].push_back(i);
    }
  }
  const auto returned = [&](ir::ValueId id) {
    return std::count(graph.outputs.begin(), graph.outputs.end(), id);
  };
  std::map<ir::ValueId, ir::ValueId> out;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const ir::ValueId input = updated_by(graph, graph.nodes[i]);
    if (input == ir::kNoValue || phases[i] % 2 == 0) continue;
    const ir::ValueId value = graph.nodes[i].results[0];
    const auto& after = readers[static_cast<size_t>(value)];
    const bool inside = std::all_of(after.begin(), after.end(),
                                    [&](size_t reader) { return phases[reader] == phases[i]; });
    const bool once = readers[static_cast<size_t>(input)].size() == 1;
    if (inside && once && returned(input) == 0 && returned(value) == 1) out[input] = value;
  }
  return out;
}

/// Builds the graph of one part and knows which of its outputs others use.
class PartBuilder {
 public:
  PartBuilder(const ir::Graph& source, bool on_device,
              const std::map<ir::ValueId, ir::ValueId>& states)
      : source_(source), states_(states) {
    part_.on_device = on_device;
    part_.graph.symbols = source.symbols;
  }

  void add(size_t index, const std::map<ir::ValueId, Port>& produced) {
    const ir::Node& node = source_.nodes[index];
    ir::Node copy = node;
    for (ir::ValueId& id : copy.operands) {
      if (id != ir::kNoValue) id = local(id, produced);
    }
    for (size_t r = 0; r < node.results.size(); ++r) {
      copy.results[r] = part_.graph.add_result(source_.type(node.results[r]));
      locals_[node.results[r]] = copy.results[r];
    }
    part_.graph.nodes.push_back(std::move(copy));
    part_.nodes.push_back(index);
  }

  int publish(ir::ValueId id) {
    part_.graph.outputs.push_back(locals_.at(id));
    return static_cast<int>(part_.graph.outputs.size()) - 1;
  }

  const std::vector<int>& states() const { return part_.states; }

  Part take() { return std::move(part_); }

 private:
  ir::ValueId local(ir::ValueId id, const std::map<ir::ValueId, Port>& produced) {
    const auto at = locals_.find(id);
    if (at != locals_.end()) return at->second;
    const ir::Value& value = source_.value(id);
    ir::ValueId made = ir::kNoValue;
    if (value.kind == ir::ValueKind::kWeight) {
      made = part_.graph.add_weight(value.name, value.type);
    } else if (value.kind == ir::ValueKind::kLiteral) {
      made = part_.graph.add_literal(value.type, value.literal);
    } else {
      const bool stays = states_.contains(id);
      made =
          part_.graph.add_input("input" + std::to_string(part_.inputs.size()), value.type, stays);
      part_.inputs.push_back(produced.at(id));
      if (stays) part_.states.push_back(produced.at(id).index);
    }
    locals_[id] = made;
    return made;
  }

  const ir::Graph& source_;
  const std::map<ir::ValueId, ir::ValueId>& states_;
  Part part_;
  std::map<ir::ValueId, ir::ValueId> locals_;
};

Partition build(const ir::Graph& graph, const std::vector<int>& phases) {
  // A value leaves its part when a node of another phase or the program's caller uses it.
  std::vector<int> phase_of_value(graph.num_values(), -1);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const ir::ValueId id : graph.nodes[i].results) {
      phase_of_value[static_cast<size_t>(id)] = phases[i];
    }
  }
  std::vector<bool> leaves(graph.num_values(), false);
  for (const ir::ValueId id : graph.outputs) leaves[static_cast<size_t>(id)] = true;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    for (const ir::ValueId id : graph.nodes[i].operands) {
      if (id == ir::kNoValue) continue;
      const int phase = phase_of_value[static_cast<size_t>(id)];
      if (phase >= 0 && phase != phases[i]) leaves[static_cast<size_t>(id)] = true;
    }
  }
  Partition out;
  std::map<ir::ValueId, Port> produced;
  for (size_t i = 0; i < graph.inputs().size(); ++i) {
    produced[graph.inputs()[i]] = {-1, static_cast<int>(i)};
  }
  const std::map<ir::ValueId, ir::ValueId> states = states_of(graph, phases);
  std::vector<bool> stays(graph.num_values(), false);
  for (const auto& [input, value] : states) stays[static_cast<size_t>(value)] = true;
  const int last = phases.empty() ? -1 : *std::max_element(phases.begin(), phases.end());
  for (int phase = 0; phase <= last; ++phase) {
    PartBuilder builder(graph, phase % 2 == 1, states);
    bool any = false;
    for (size_t i = 0; i < phases.size(); ++i) {
      if (phases[i] != phase) continue;
      builder.add(i, produced);
      any = true;
    }
    if (!any) continue;
    const int number = static_cast<int>(out.parts.size());
    for (size_t i = 0; i < phases.size(); ++i) {
      if (phases[i] != phase) continue;
      for (const ir::ValueId id : graph.nodes[i].results) {
        if (!leaves[static_cast<size_t>(id)] || stays[static_cast<size_t>(id)]) continue;
        produced[id] = {number, builder.publish(id)};
      }
    }
    for (const int input : builder.states()) {
      const ir::ValueId value = states.at(graph.inputs()[static_cast<size_t>(input)]);
      produced[value] = {number, builder.publish(value)};
    }
    out.parts.push_back(builder.take());
  }
  for (const ir::ValueId id : graph.outputs) {
    const auto at = produced.find(id);
    if (at == produced.end()) {
      throw Error(RM_UNIMPLEMENTED, "[partition] expected computed outputs, got a constant one",
                  "RM304");
    }
    out.outputs.push_back(at->second);
  }
  return out;
}

}  // namespace

Partition partition(const ir::Graph& graph, const std::vector<bool>& supported, size_t minimum) {
  if (supported.size() != graph.nodes.size()) {
    throw_invalid("[partition] expected a verdict for each of " +
                  std::to_string(graph.nodes.size()) + " nodes, got " +
                  std::to_string(supported.size()));
  }
  std::vector<bool> on_device = supported;
  std::vector<bool> too_small(graph.nodes.size(), false);
  while (true) {
    const std::vector<int> phases = phases_of(graph, on_device);
    std::map<int, size_t> sizes;
    for (size_t i = 0; i < phases.size(); ++i) {
      if (on_device[i]) sizes[phases[i]] += computes(graph.nodes[i]) ? 1 : 0;
    }
    bool changed = false;
    for (size_t i = 0; i < phases.size(); ++i) {
      if (!on_device[i] || sizes[phases[i]] >= minimum) continue;
      on_device[i] = false;
      too_small[i] = changed = true;
    }
    if (changed) continue;
    Partition out = build(graph, phases);
    out.too_small = std::move(too_small);
    return out;
  }
}

}  // namespace rm::partition
