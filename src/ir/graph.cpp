// Graph bookkeeping: values, uses, compaction, substitution of symbols.
#include "ir/graph.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/error.hpp"
#include "ir/scalar.hpp"

namespace rm::ir {
namespace {

template <typename T>
const T& attr_as(const Node& node, std::string_view name, const char* kind) {
  auto it = node.attrs.find(name);
  if (it == node.attrs.end() || !std::holds_alternative<T>(it->second)) {
    throw_invalid("[" + node.op + "] expected attribute '" + std::string(name) + "' of kind " +
                  kind + ", got " + (it == node.attrs.end() ? "none" : "another kind"));
  }
  return std::get<T>(it->second);
}

}  // namespace

int64_t Node::i(std::string_view attr) const { return attr_as<int64_t>(*this, attr, "int"); }
double Node::f(std::string_view attr) const { return attr_as<double>(*this, attr, "float"); }
const std::string& Node::s(std::string_view attr) const {
  return attr_as<std::string>(*this, attr, "string");
}
const std::vector<int64_t>& Node::ints(std::string_view attr) const {
  return attr_as<std::vector<int64_t>>(*this, attr, "ints");
}
const std::vector<double>& Node::floats(std::string_view attr) const {
  return attr_as<std::vector<double>>(*this, attr, "floats");
}
const Dims& Node::dims(std::string_view attr) const { return attr_as<Dims>(*this, attr, "dims"); }
int64_t Node::i_or(std::string_view attr, int64_t otherwise) const {
  return has(attr) ? i(attr) : otherwise;
}
double Node::f_or(std::string_view attr, double otherwise) const {
  return has(attr) ? f(attr) : otherwise;
}
std::string Node::s_or(std::string_view attr, std::string_view otherwise) const {
  return has(attr) ? s(attr) : std::string(otherwise);
}

ValueId Graph::add_input(std::string name, TensorType type, bool donated) {
  values_.push_back({std::move(type), ValueKind::kInput, donated, std::move(name), {}});
  inputs_.push_back(static_cast<ValueId>(values_.size() - 1));
  return inputs_.back();
}

ValueId Graph::add_weight(std::string name, TensorType type) {
  values_.push_back({std::move(type), ValueKind::kWeight, false, std::move(name), {}});
  return static_cast<ValueId>(values_.size() - 1);
}

ValueId Graph::add_literal(TensorType type, std::string bytes) {
  if (!type.is_static()) throw_invalid("[literal] expected a static type, got " + type.str());
  if (static_cast<int64_t>(bytes.size()) != type.num_bytes()) {
    throw_invalid("[literal] expected " + std::to_string(type.num_bytes()) + " bytes for " +
                  type.str() + ", got " + std::to_string(bytes.size()));
  }
  values_.push_back({std::move(type), ValueKind::kLiteral, false, {}, std::move(bytes)});
  return static_cast<ValueId>(values_.size() - 1);
}

ValueId Graph::add_result(TensorType type) {
  values_.push_back({std::move(type), ValueKind::kResult, false, {}, {}});
  return static_cast<ValueId>(values_.size() - 1);
}

ValueId Graph::append(std::string op, std::vector<ValueId> operands, Attrs attrs, TensorType type) {
  return insert(nodes.size(), std::move(op), std::move(operands), std::move(attrs),
                std::move(type));
}

ValueId Graph::insert(size_t at, std::string op, std::vector<ValueId> operands, Attrs attrs,
                      TensorType type) {
  ValueId result = add_result(std::move(type));
  nodes.insert(nodes.begin() + static_cast<std::ptrdiff_t>(at),
               Node{std::move(op), std::move(operands), {result}, std::move(attrs)});
  return result;
}

std::vector<ValueId> Graph::weights() const {
  std::vector<ValueId> out;
  for (size_t i = 0; i < values_.size(); ++i) {
    if (values_[i].kind == ValueKind::kWeight) out.push_back(static_cast<ValueId>(i));
  }
  return out;
}

void Graph::replace_all_uses(ValueId from, ValueId to) {
  for (auto& node : nodes) std::replace(node.operands.begin(), node.operands.end(), from, to);
  std::replace(outputs.begin(), outputs.end(), from, to);
}

std::vector<int32_t> Graph::definitions() const {
  std::vector<int32_t> defs(values_.size(), -1);
  for (size_t n = 0; n < nodes.size(); ++n) {
    for (ValueId r : nodes[n].results) defs[static_cast<size_t>(r)] = static_cast<int32_t>(n);
  }
  return defs;
}

std::vector<int32_t> Graph::use_counts() const {
  std::vector<int32_t> uses(values_.size(), 0);
  for (const auto& node : nodes) {
    for (ValueId v : node.operands) {
      if (v != kNoValue) ++uses[static_cast<size_t>(v)];
    }
  }
  for (ValueId v : outputs) ++uses[static_cast<size_t>(v)];
  return uses;
}

void Graph::compact() {
  std::vector<char> live(values_.size(), 0);
  for (ValueId v : outputs) live[static_cast<size_t>(v)] = 1;
  for (ValueId v : inputs_) live[static_cast<size_t>(v)] = 1;  // the signature stays
  std::vector<Node> kept;
  for (auto it = nodes.rbegin(); it != nodes.rend(); ++it) {
    bool used = std::any_of(it->results.begin(), it->results.end(),
                            [&](ValueId r) { return live[static_cast<size_t>(r)] != 0; });
    if (!used && !is_kept(*it)) continue;
    for (ValueId v : it->operands) {
      if (v != kNoValue) live[static_cast<size_t>(v)] = 1;
    }
    for (ValueId r : it->results) live[static_cast<size_t>(r)] = 1;
    kept.push_back(std::move(*it));
  }
  std::reverse(kept.begin(), kept.end());

  std::vector<ValueId> renumbered(values_.size(), kNoValue);
  std::vector<Value> values;
  auto visit = [&](ValueId v) {
    if (v == kNoValue) return kNoValue;
    ValueId& to = renumbered[static_cast<size_t>(v)];
    if (to == kNoValue) {
      to = static_cast<ValueId>(values.size());
      values.push_back(std::move(values_[static_cast<size_t>(v)]));
    }
    return to;
  };
  for (ValueId& v : inputs_) v = visit(v);
  // Weights and literals in order of first use, then results in node order: the printed form then
  // lists them in value order.
  for (auto kind : {ValueKind::kWeight, ValueKind::kLiteral}) {
    auto declare = [&](ValueId v) {
      if (v != kNoValue && renumbered[static_cast<size_t>(v)] == kNoValue &&
          values_[static_cast<size_t>(v)].kind == kind) {
        visit(v);
      }
    };
    for (const auto& node : kept) std::for_each(node.operands.begin(), node.operands.end(), declare);
    std::for_each(outputs.begin(), outputs.end(), declare);
  }
  for (auto& node : kept) {
    for (ValueId& v : node.operands) v = visit(v);
    for (ValueId& v : node.results) v = visit(v);
  }
  for (ValueId& v : outputs) v = visit(v);
  nodes = std::move(kept);
  values_ = std::move(values);
}

ValueId add_scalar(Graph& graph, DType dtype, double value) {
  std::string bytes(size_bytes(dtype), '\0');
  store_element(dtype, bytes.data(), value);
  return graph.add_literal({dtype, {}}, std::move(bytes));
}

double literal_element(const Graph& graph, ValueId id, int64_t index) {
  const Value& v = graph.value(id);
  if (v.kind != ValueKind::kLiteral || index < 0 || index >= v.type.num_elements()) {
    throw_invalid("[literal] expected a literal with element " + std::to_string(index) + ", got " +
                  v.type.str());
  }
  return load_element(v.type.dtype,
                      v.literal.data() + static_cast<size_t>(index) * size_bytes(v.type.dtype));
}

Graph substitute(const Graph& graph, const Bindings& bindings) {
  Graph out = graph;
  auto apply = [&](Dims& dims, bool is_shape) {
    for (Dim& d : dims) {
      d = d.substitute(bindings);
      if (is_shape && d.is_static() && d.value() < 0) {
        throw_invalid("[substitute] expected dimensions >= 0, got " + d.str());
      }
    }
  };
  for (size_t i = 0; i < out.num_values(); ++i) {
    apply(out.value(static_cast<ValueId>(i)).type.dims, true);
  }
  for (auto& node : out.nodes) {
    for (auto& [name, attr] : node.attrs) {
      if (auto* dims = std::get_if<Dims>(&attr)) apply(*dims, false);
    }
  }
  out.relations.clear();
  for (const Relation& relation : graph.relations) {
    Relation now = relation.substitute(bindings);
    if (!now.is_static()) {
      out.relations.push_back(std::move(now));
    } else if (!now.order_holds()) {
      throw_invalid("[substitute] expected sizes with " + relation.str() + ", got " + now.str());
    }
  }
  for (const auto& [name, value] : bindings) out.symbols.erase(name);
  return out;
}

}  // namespace rm::ir
