// Phases: a node's phase is the highest of its operands', raised by one where the side changes;
// even phases are the host's, odd ones the device's. All nodes of a phase are one part. A phase
// never falls along an edge, so the parts are convex, and there are as few changes of side as the
// longest alternating path has.
#include "passes/partition.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "base/error.hpp"

namespace rm::passes {
namespace {

constexpr std::array<std::string_view, 7> kViews = {"reshape", "permute", "expand",   "slice",
                                                    "iota",    "full",    "dim_value"};

bool computes(const ir::Node& node) {
  return std::find(kViews.begin(), kViews.end(), node.op) == kViews.end();
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
  return of_node;
}

/// Builds the graph of one part and knows which of its outputs others use.
class PartBuilder {
 public:
  PartBuilder(const ir::Graph& source, bool on_device) : source_(source) {
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
      made = part_.graph.add_input("input" + std::to_string(part_.inputs.size()), value.type);
      part_.inputs.push_back(produced.at(id));
    }
    locals_[id] = made;
    return made;
  }

  const ir::Graph& source_;
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
  const int last = phases.empty() ? -1 : *std::max_element(phases.begin(), phases.end());
  for (int phase = 0; phase <= last; ++phase) {
    PartBuilder builder(graph, phase % 2 == 1);
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
        if (leaves[static_cast<size_t>(id)]) produced[id] = {number, builder.publish(id)};
      }
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

}  // namespace rm::passes
