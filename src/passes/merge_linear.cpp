// Linears that read one operand (query, key and value; gate and up) become one linear on weights
// concatenated along axis 0, and slices of its result. Only constant weights are merged: the
// concatenation is then a constant expression, computed once. A program that is to run before that
// was computed takes such products apart again.
#include <map>
#include <optional>

#include "ops/registry.hpp"
#include "passes/passes.hpp"

namespace rm::passes {
namespace {

using ir::Dim;
using ir::Dims;
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

/// The pieces of a concatenation of weights along axis 0; null for anything else.
const Node* joined(const Graph& graph, const std::vector<int32_t>& defs, ValueId v) {
  if (v == ir::kNoValue || defs[static_cast<size_t>(v)] < 0) return nullptr;
  const Node& node = graph.nodes[static_cast<size_t>(defs[static_cast<size_t>(v)])];
  return node.op == "concat" && node.i("axis") == 0 ? &node : nullptr;
}

/// A product of joined weights, and where in them each piece begins (and the last one ends).
struct Joined {
  std::vector<ValueId> weights, biases;  // no biases: none
  std::vector<int64_t> starts = {0};

  /// The piece that a slice of the result is; -1 when it is none.
  int64_t piece_of(const Graph& graph, const Node& slice, ValueId y) const {
    if (slice.op != "slice" || slice.operands[0] != y || slice.i("step") != 1 ||
        slice.i("axis") + 1 != static_cast<int64_t>(graph.type(y).rank())) {
      return -1;
    }
    const Dim start = slice.dims("start")[0], stop = slice.dims("stop")[0];
    for (size_t i = 0; i + 1 < starts.size(); ++i) {
      if (start == Dim(starts[i]) && stop == Dim(starts[i + 1])) return static_cast<int64_t>(i);
    }
    return -1;
  }
};

std::optional<Joined> joined_product(const Graph& graph, const std::vector<int32_t>& defs,
                                     const std::vector<char>& constant, const Node& node) {
  if (node.op != "gemm" || node.i_or("trans_b", 0) == 0 || node.s_or("activation", "none") != "none") return {};
  if (node.operands.size() > 3 && node.operands[3] != ir::kNoValue) return {};
  const Node* weights = joined(graph, defs, node.operands[1]);
  if (weights == nullptr || constant[static_cast<size_t>(weights->result())] == 0) return {};
  Joined found{weights->operands, {}};
  for (ValueId w : found.weights) {
    const Dims& dims = graph.type(w).dims;
    if (dims.size() != 2 || !dims[0].is_static()) return {};
    found.starts.push_back(found.starts.back() + dims[0].value());
  }
  if (bias_of(node) == ir::kNoValue) return found;
  const Node* biases = joined(graph, defs, bias_of(node));
  if (biases == nullptr || biases->operands.size() != found.weights.size()) return {};
  found.biases = biases->operands;
  for (size_t i = 0; i < found.biases.size(); ++i) {
    if (graph.type(found.biases[i]).dims[0] != graph.type(found.weights[i]).dims[0]) return {};
  }
  return found;
}

}  // namespace

bool part_products(Graph& graph) {
  const std::vector<char> constant = ops::constant_values(graph);
  const std::vector<int32_t> defs = graph.definitions();
  std::map<ValueId, Joined> products;
  for (const Node& node : graph.nodes) {
    if (auto found = joined_product(graph, defs, constant, node)) products.emplace(node.result(), *found);
  }
  // Whoever reads something else than a piece keeps the product whole.
  for (const Node& node : graph.nodes) {
    for (ValueId v : node.operands) {
      const auto it = products.find(v);
      if (it != products.end() && it->second.piece_of(graph, node, v) < 0) products.erase(it);
    }
  }
  for (ValueId v : graph.outputs) products.erase(v);
  if (products.empty()) return false;
  for (Node& node : graph.nodes) {
    const auto it = node.op == "slice" ? products.find(node.operands[0]) : products.end();
    if (it == products.end()) continue;
    const auto piece = static_cast<size_t>(it->second.piece_of(graph, node, it->first));
    const Node& whole = graph.nodes[static_cast<size_t>(defs[static_cast<size_t>(it->first)])];
    const ValueId bias = it->second.biases.empty() ? ir::kNoValue : it->second.biases[piece];
    node = {"gemm",
            {whole.operands[0], it->second.weights[piece], bias, ir::kNoValue},
            node.results,
            whole.attrs};
  }
  graph.compact();
  return true;
}

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
