// One sweep in node order; weights that several products read are quantised once.
#include "passes/quantize.hpp"

#include <algorithm>
#include <map>
#include <tuple>

#include "base/error.hpp"
#include "ops/linear/quantized.hpp"
#include "ops/registry.hpp"
#include "passes/passes.hpp"

namespace rm::passes {
namespace {

using ir::DType;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using ir::ValueId;

ValueId operand(const Node& node, size_t i) {
  return i < node.operands.size() ? node.operands[i] : ir::kNoValue;
}

struct Source {
  ValueId weight;
  bool transposed;
};

bool is_transposition(const Node& node) {
  return node.op == "permute" && node.ints("axes") == std::vector<int64_t>{1, 0};
}

/// The weights a matrix of rows [N, K] is made of: themselves, transposed, joined by rows. False
/// for any other expression.
bool find_sources(const std::vector<const Node*>& makers, const Graph& graph, ValueId v,
                  bool transposed, std::vector<Source>* out) {
  if (graph.value(v).kind == ir::ValueKind::kWeight) {
    out->push_back({v, transposed});
    return true;
  }
  const Node* node = makers[static_cast<size_t>(v)];
  if (node == nullptr) return false;
  if (is_transposition(*node)) {
    return find_sources(makers, graph, node->operands[0], !transposed, out);
  }
  if (node->op != "concat" || node->i("axis") != (transposed ? 1 : 0)) return false;
  return std::all_of(node->operands.begin(), node->operands.end(), [&](ValueId part) {
    return find_sources(makers, graph, part, transposed, out);
  });
}

class Sweep {
 public:
  Sweep(Graph& graph, const QuantizeOptions& options) : graph_(graph), options_(options) {
    // Nodes move while the sweep runs: what makes constants is looked up in a copy of them.
    before_ = graph.nodes;
    makers_.assign(graph.num_values(), nullptr);
    for (const Node& node : before_) {
      for (ValueId r : node.results) makers_[static_cast<size_t>(r)] = &node;
    }
    for (size_t v = 0; v < graph.num_values(); ++v) {
      constant_.push_back(graph.is_constant(static_cast<ValueId>(v)));
    }
  }

  int64_t run() {
    int64_t replaced = 0;
    for (size_t n = 0; n < graph_.nodes.size(); ++n) {
      Node node = std::move(graph_.nodes[n]);
      const bool constant = ops::is_constant(node, [&](ValueId v) { return is_constant(v); });
      for (ValueId r : node.results) constant_[static_cast<size_t>(r)] = constant;
      if (!constant && replaces(node)) {
        node = replacement(node);
        ++replaced;
      }
      out_.push_back(std::move(node));
    }
    graph_.nodes = std::move(out_);
    graph_.compact();
    return replaced;
  }

 private:
  bool is_constant(ValueId v) const {
    return v == ir::kNoValue || constant_[static_cast<size_t>(v)] != 0;
  }

  bool replaces(const Node& node) const {
    if (node.op != "linear" && node.op != "gemm") return false;
    if (node.op == "gemm" && node.f_or("alpha", 1.0) != 1.0) return false;
    const TensorType& w = graph_.type(node.operands[1]);
    const TensorType& x = graph_.type(node.operands[0]);
    if (!is_constant(node.operands[1]) || w.rank() != 2 || x.rank() < 2) return false;
    if (!w.dims[0].is_static() || !w.dims[1].is_static()) return false;
    if (x.dtype != DType::kF32 && x.dtype != DType::kBF16 && x.dtype != DType::kF16) return false;
    if (w.dims[0].value() * w.dims[1].value() < options_.least_elements) return false;
    std::vector<Source> sources;
    const bool by_rows = node.op == "linear" || node.i_or("trans_b", 1) != 0;
    return find_sources(makers_, graph_, node.operands[1], !by_rows, &sources);
  }

  std::vector<ValueId> emit(std::string op, std::vector<ValueId> operands, ir::Attrs attrs,
                            const std::vector<TensorType>& types) {
    std::vector<ValueId> results;
    for (const TensorType& type : types) {
      results.push_back(graph_.add_result(type));
      constant_.push_back(1);
    }
    out_.push_back({std::move(op), std::move(operands), results, std::move(attrs)});
    return results;
  }

  /// q, scale and zero point of a weight [N, K] (or [K, N], then of its transpose).
  const std::vector<ValueId>& quantised(ValueId weight, bool transposed) {
    std::vector<ValueId>& made = made_[{weight, transposed}];
    if (!made.empty()) return made;
    TensorType w = graph_.type(weight);
    ValueId source = weight;
    if (!transposed) {
      std::swap(w.dims[0], w.dims[1]);
      source = emit("permute", {weight}, {{"axes", std::vector<int64_t>{1, 0}}}, {w})[0];
    }
    const ops::QuantLayout layout{w.dims[1].value(), options_.bits, options_.group, 0, tile()};
    std::vector<TensorType> types = {
        {options_.bits == 8 ? DType::kI8 : DType::kU8, {w.dims[0], layout.row_bytes()}},
        {DType::kF16, {w.dims[0], layout.groups()}}};
    if (options_.pairs) types[1] = {w.dtype, {layout.groups(), w.dims[0]}};
    if (!options_.symmetric) types.push_back(types[1]);
    ir::Attrs attrs = {{"bits", options_.bits},
                       {"group", options_.group},
                       {"symmetric", int64_t{options_.symmetric ? 1 : 0}}};
    if (tile() != 1) attrs.emplace("tile", tile());
    if (options_.pairs) attrs.emplace("pairs", int64_t{1});
    made = emit("quantize", {source}, std::move(attrs), types);
    made.resize(3, ir::kNoValue);
    return made;
  }

  Node replacement(const Node& node) {
    const bool transposed = node.op == "linear" || node.i_or("trans_b", 1) != 0;
    const std::vector<ValueId>& w = quantised(node.operands[1], transposed);
    ir::Attrs attrs = {{"bits", options_.bits},
                       {"group", options_.group},
                       {"activation", node.s_or("activation", "none")}};
    if (tile() != 1) {
      attrs.emplace("tile", tile());
      attrs.emplace("x_bits", options_.activation_bits);
    }
    if (options_.pairs) attrs.emplace("pairs", int64_t{1});
    return {"quant_linear",
            {node.operands[0], w[0], w[1], w[2], operand(node, 2), operand(node, 3)},
            node.results,
            std::move(attrs)};
  }

  int64_t tile() const { return options_.activation_bits == 8 ? ops::QuantLayout::kTile : 1; }

  Graph& graph_;
  const QuantizeOptions& options_;
  std::vector<Node> before_;
  std::vector<const Node*> makers_;
  std::vector<char> constant_;
  std::vector<Node> out_;
  std::map<std::pair<ValueId, bool>, std::vector<ValueId>> made_;
};

}  // namespace

int64_t quantize_linears(Graph& graph, const QuantizeOptions& options) {
  const bool bits = options.bits == 8 || options.bits == 4;
  const bool group = options.group == 32 || options.group == 64 || options.group == 128;
  if (!bits || !group) {
    throw_invalid("[quantize] expected bits 8 or 4 and group 32, 64 or 128, got " +
                  std::to_string(options.bits) + " and " + std::to_string(options.group));
  }
  const int64_t x = options.activation_bits;
  if ((x != 16 && x != 8) || (x == 8 && !options.symmetric)) {
    throw_invalid(
        "[quantize] expected activations of 16 bits, or of 8 with symmetric weights, got " +
        std::to_string(x));
  }
  if (options.pairs && (x == 8 || !options.symmetric)) {
    throw_invalid(
        "[quantize] expected symmetric weights and activations of 16 bits with pairs, got others");
  }
  const int64_t replaced = Sweep(graph, options).run();
  ops::infer_and_check(graph);
  return replaced;
}

void keep_activations(Graph& graph) {
  for (Node& node : graph.nodes) {
    if (node.op == "quant_linear") node.attrs.erase("x_bits");
  }
}

std::vector<QuantisedWeight> quantised_weights(const Graph& graph) {
  std::vector<const Node*> makers(graph.num_values(), nullptr);
  for (const Node& node : graph.nodes) {
    for (ValueId r : node.results) makers[static_cast<size_t>(r)] = &node;
  }
  std::vector<QuantisedWeight> out;
  for (const Node& node : graph.nodes) {
    if (node.op != "quantize") continue;
    std::vector<Source> sources;
    if (!find_sources(makers, graph, node.operands[0], false, &sources)) {
      throw_invalid(
          "[quantize] expected weights as they lie below a quantize node, got an expression");
    }
    for (const Source& s : sources) {
      out.push_back({graph.value(s.weight).name, node.i_or("bits", 8), node.i_or("group", 32),
                     node.i_or("symmetric", 1) != 0, s.transposed, node.i_or("pairs", 0) != 0});
    }
  }
  const auto fields = [](const QuantisedWeight& w) {
    return std::tie(w.name, w.bits, w.group, w.symmetric, w.transposed, w.pairs);
  };
  std::sort(out.begin(), out.end(),
            [&](const auto& a, const auto& b) { return fields(a) < fields(b); });
  out.erase(std::unique(out.begin(), out.end(),
                        [&](const auto& a, const auto& b) { return fields(a) == fields(b); }),
            out.end());
  return out;
}

void quantize(Graph& graph, const PassContext& context) {
  if (context.weight_bits == 0) return;
  QuantizeOptions options;
  options.bits = context.weight_bits, options.group = context.weight_group;
  options.activation_bits = context.activation_bits;
  options.pairs = context.for_gpu;
  quantize_linears(graph, options);
}

}  // namespace rm::passes
