// Common subexpressions: nodes, literals and weights with the same key become the first of them.
#include <map>

#include "ops/registry.hpp"
#include "passes/passes.hpp"

namespace rm::passes {
namespace {

using ir::Graph;
using ir::Node;
using ir::ValueId;

struct AttrKey {
  std::string operator()(int64_t v) const { return "i" + std::to_string(v); }
  std::string operator()(double v) const {
    return "f" + std::string(reinterpret_cast<const char*>(&v), sizeof v);
  }
  std::string operator()(const std::string& v) const { return "s" + std::to_string(v.size()) + v; }
  template <typename T>
  std::string operator()(const std::vector<T>& items) const {
    std::string out = "[";
    for (const T& item : items) out += (*this)(item) + ",";
    return out + "]";
  }
  std::string operator()(const ir::Dim& d) const { return "d" + d.str(); }
};

std::string node_key(const Graph& graph, const Node& node) {
  std::string key = node.op + "(";
  for (ValueId v : node.operands) key += std::to_string(v) + ",";
  key += ")";
  for (const auto& [name, attr] : node.attrs) key += name + "=" + std::visit(AttrKey{}, attr) + ";";
  for (ValueId r : node.results) key += graph.type(r).str();
  return key;
}

}  // namespace

void cse(Graph& graph, const PassContext&) {
  std::vector<ValueId> first(graph.num_values());
  std::map<std::string, ValueId> constants;
  for (size_t i = 0; i < first.size(); ++i) {
    auto v = static_cast<ValueId>(i);
    const ir::Value& value = graph.value(v);
    first[i] = v;
    if (!graph.is_constant(v)) continue;
    std::string key =
        (value.kind == ir::ValueKind::kWeight ? "w" + value.name : "l" + value.literal) +
        value.type.str();
    first[i] = constants.emplace(std::move(key), v).first->second;
  }
  std::map<std::string, size_t> seen;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    Node& node = graph.nodes[n];
    for (ValueId& v : node.operands) {
      if (v != ir::kNoValue) v = first[static_cast<size_t>(v)];
    }
    if (!ops::is_pure(node)) continue;
    const Node& original = graph.nodes[seen.emplace(node_key(graph, node), n).first->second];
    for (size_t r = 0; r < node.results.size(); ++r) {
      first[static_cast<size_t>(node.results[r])] = original.results[r];
    }
  }
  for (ValueId& v : graph.outputs) v = first[static_cast<size_t>(v)];
  graph.compact();
}

}  // namespace rm::passes
