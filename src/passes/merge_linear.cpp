// Linears that read one operand (query, key and value; gate and up) become one linear on weights
// concatenated along axis 0, and slices of its result. Only constant weights are merged: the
// concatenation is then a constant expression, computed once.
#include <map>

#include "ops/registry.hpp"
#include "passes/passes.hpp"

namespace rm::passes {
namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using ir::ValueId;

ValueId bias_of(const Node& linear) {
  return linear.operands.size() > 2 ? linear.operands[2] : ir::kNoValue;
}

bool is_activation(std::string_view op) {
  return op == "relu" || op == "gelu" || op == "gelu_tanh" || op == "silu" || op == "tanh" ||
         op == "sigmoid";
}

// Linears that feed an activation alone take it as their epilogue, so they stay apart; a gated one,
// act(gate) * up, has its activation in the product's program anyway.
class EpilogueReader {
 public:
  explicit EpilogueReader(const Graph& graph)
      : graph_(graph), uses_(graph.use_counts()), reader_(graph.num_values(), -1) {
    for (size_t n = 0; n < graph.nodes.size(); ++n) {
      for (ValueId v : graph.nodes[n].operands) {
        if (v != ir::kNoValue) reader_[static_cast<size_t>(v)] = static_cast<int32_t>(n);
      }
    }
  }

  bool keeps_apart(const Node& linear) const {
    const Node* activation = only_reader(linear.result());
    if (activation == nullptr || !is_activation(activation->op)) return false;
    const Node* product = only_reader(activation->result());
    return product == nullptr || product->op != "mul";
  }

 private:
  const Node* only_reader(ValueId v) const {
    auto i = static_cast<size_t>(v);
    return uses_[i] == 1 && reader_[i] >= 0 ? &graph_.nodes[static_cast<size_t>(reader_[i])]
                                            : nullptr;
  }

  const Graph& graph_;
  std::vector<int32_t> uses_, reader_;
};

// Linears by the operand they read, in node order; only groups of two and more.
std::map<ValueId, std::vector<size_t>> groups(const Graph& graph) {
  const std::vector<char> constant = ops::constant_values(graph);
  std::vector<int32_t> defs = graph.definitions();
  EpilogueReader epilogues(graph);
  std::map<ValueId, std::vector<size_t>> found;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    if (node.op != "linear" || constant[static_cast<size_t>(node.operands[0])] != 0) continue;
    auto it = found.find(node.operands[0]);
    auto at = static_cast<int32_t>(it == found.end() ? n : it->second.front());
    // The merged node stands where the first one does: its weights must be defined above.
    auto ready = [&](ValueId v) {
      return v == ir::kNoValue ||
             (constant[static_cast<size_t>(v)] != 0 && defs[static_cast<size_t>(v)] < at);
    };
    bool merges = ready(node.operands[1]) && ready(bias_of(node)) &&
                  graph.type(node.operands[1]).dims[0].is_static() && !epilogues.keeps_apart(node);
    if (merges) found[node.operands[0]].push_back(n);
  }
  std::erase_if(found, [](const auto& group) { return group.second.size() < 2; });
  return found;
}

ValueId add_node(Graph& graph, std::vector<Node>& out, std::string op,
                 std::vector<ValueId> operands, ir::Attrs attrs, TensorType type) {
  ValueId result = graph.add_result(std::move(type));
  out.push_back({std::move(op), std::move(operands), {result}, std::move(attrs)});
  return result;
}

// Concatenation of the biases, zeros for those that have none; kNoValue when none has one.
ValueId merged_bias(Graph& graph, std::vector<Node>& out, const std::vector<size_t>& group,
                    const TensorType& merged_type) {
  std::vector<ValueId> biases;
  bool any = false;
  for (size_t n : group) any = any || bias_of(graph.nodes[n]) != ir::kNoValue;
  if (!any) return ir::kNoValue;
  for (size_t n : group) {
    ValueId bias = bias_of(graph.nodes[n]);
    if (bias == ir::kNoValue) {
      TensorType type{merged_type.dtype, {graph.type(graph.nodes[n].operands[1]).dims[0]}};
      bias = add_node(graph, out, "full", {}, {{"value", 0.0}}, type);
    }
    biases.push_back(bias);
  }
  return add_node(graph, out, "concat", std::move(biases), {{"axis", int64_t{0}}}, merged_type);
}

// Emits the merged linear and turns the group's nodes into slices of it, in place.
void merge(Graph& graph, std::vector<Node>& out, const std::vector<size_t>& group) {
  std::vector<ValueId> weights;
  Dim rows = 0;
  for (size_t n : group) {
    weights.push_back(graph.nodes[n].operands[1]);
    rows = rows + graph.type(weights.back()).dims[0];
  }
  const Node& first = graph.nodes[group.front()];
  ValueId x = first.operands[0];
  TensorType weight_type = graph.type(weights[0]), result_type = graph.type(first.result());
  weight_type.dims[0] = rows;
  result_type.dims.back() = rows;
  ValueId w = add_node(graph, out, "concat", weights, {{"axis", int64_t{0}}}, weight_type);
  ValueId bias = merged_bias(graph, out, group, {weight_type.dtype, {rows}});
  ValueId y = add_node(graph, out, "linear", {x, w, bias}, {}, result_type);
  auto axis = static_cast<int64_t>(result_type.rank()) - 1;
  Dim start = 0;
  for (size_t i = 0; i < group.size(); ++i) {
    Dim stop = start + graph.type(weights[i]).dims[0];
    Node& node = graph.nodes[group[i]];
    node = {"slice",
            {y},
            node.results,
            {{"axis", axis},
             {"start", ir::Dims{start}},
             {"step", int64_t{1}},
             {"stop", ir::Dims{stop}}}};
    start = stop;
  }
}

}  // namespace

void merge_linear(Graph& graph, const PassContext& context) {
  if (context.weight_bits != 0) return;
  for (ValueId v : graph.inputs()) {
    if (graph.value(v).donated) return;
  }
  std::map<size_t, std::vector<size_t>> by_first;
  for (auto& [x, group] : groups(graph)) by_first[group.front()] = group;
  std::vector<Node> out;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    if (auto it = by_first.find(n); it != by_first.end()) merge(graph, out, it->second);
    out.push_back(std::move(graph.nodes[n]));
  }
  graph.nodes = std::move(out);
  graph.compact();
}

}  // namespace rm::passes
