// The sweep: use counts are kept exact while nodes die, so "single use" means what it says.
#include "passes/rewriter.hpp"

#include <algorithm>
#include <cstring>

#include "base/error.hpp"
#include "ir/scalar.hpp"
#include "ops/infer.hpp"
#include "ops/registry.hpp"

namespace rm::passes {

using ir::Graph;
using ir::kNoValue;
using ir::Node;
using ir::ValueId;

Rewriter::Rewriter(Graph& graph)
    : graph_(graph),
      def_(graph.num_values(), -1),
      uses_(graph.use_counts()),
      forward_(graph.num_values()),
      constant_(graph.num_values()) {
  for (size_t v = 0; v < forward_.size(); ++v) {
    forward_[v] = static_cast<ValueId>(v);
    constant_[v] = graph.is_constant(forward_[v]) ? 1 : 0;
  }
}

void Rewriter::run(Graph& graph, std::initializer_list<Rule> rules, int max_sweeps) {
  for (int i = 0; i < max_sweeps; ++i) {
    bool changed = Rewriter(graph).sweep({rules.begin(), rules.size()});
    graph.compact();
    if (!changed) return;
  }
}

bool Rewriter::sweep(std::span<const Rule> rules) {
  bool changed = false;
  std::vector<Node> old = std::move(graph_.nodes);
  graph_.nodes.clear();
  for (Node& node : old) {
    for (ValueId& v : node.operands) v = resolve(v);
    bool live = is_live(node);
    bool replaced = live && std::any_of(rules.begin(), rules.end(),
                                        [&](Rule rule) { return rule(*this, node); });
    changed = changed || replaced;
    if (!live || replaced) {
      release_operands(node);
      continue;
    }
    place(std::move(node));
  }
  graph_.nodes.assign(std::make_move_iterator(emitted_.begin()),
                      std::make_move_iterator(emitted_.end()));
  for (ValueId& v : graph_.outputs) v = resolve(v);
  return changed;
}

ValueId Rewriter::resolve(ValueId v) const {
  while (v != kNoValue && forward_[static_cast<size_t>(v)] != v)
    v = forward_[static_cast<size_t>(v)];
  return v;
}

void Rewriter::grow() {
  while (def_.size() < graph_.num_values()) {
    forward_.push_back(static_cast<ValueId>(def_.size()));
    def_.push_back(-1);
    uses_.push_back(0);
    constant_.push_back(graph_.is_constant(static_cast<ValueId>(constant_.size())) ? 1 : 0);
  }
}

void Rewriter::release_operands(const Node& node) {
  for (ValueId v : node.operands) release(v);
}

void Rewriter::release(ValueId v) {
  if (v == kNoValue || --uses_[static_cast<size_t>(v)] > 0) return;
  const Node* node = def(v);
  if (node == nullptr) return;
  bool dead = std::all_of(node->results.begin(), node->results.end(),
                          [&](ValueId r) { return uses(r) == 0; });
  if (dead) release_operands(*node);
}

const Node* Rewriter::def(ValueId v) const {
  if (v == kNoValue || def_[static_cast<size_t>(v)] < 0) return nullptr;
  return &emitted_[static_cast<size_t>(def_[static_cast<size_t>(v)])];
}

const Node* Rewriter::def(ValueId v, std::string_view op) const {
  const Node* node = def(v);
  return node != nullptr && node->op == op ? node : nullptr;
}

bool Rewriter::is_live(const Node& node) const {
  return ir::is_kept(node) || std::any_of(node.results.begin(), node.results.end(),
                                          [&](ValueId r) { return uses(r) > 0; });
}

bool Rewriter::used_above(ValueId v) const {
  return std::any_of(emitted_.begin(), emitted_.end(), [&](const Node& node) {
    return is_live(node) && std::find(node.operands.begin(), node.operands.end(), v) != node.operands.end();
  });
}

std::optional<double> Rewriter::splat(ValueId v) const {
  if (v == kNoValue) return std::nullopt;
  const ir::Value& value = graph_.value(v);
  if (value.kind == ir::ValueKind::kLiteral) {
    size_t item = ir::size_bytes(value.type.dtype);
    const std::string& bytes = value.literal;
    if (bytes.size() < item) return std::nullopt;
    // Every element equals the next one.
    if (std::memcmp(bytes.data(), bytes.data() + item, bytes.size() - item) != 0)
      return std::nullopt;
    return ir::load_element(value.type.dtype, bytes.data());
  }
  const Node* node = def(v, "full");
  if (node == nullptr) return std::nullopt;
  const ir::Attr& attr = node->attrs.at("value");
  if (const auto* i = std::get_if<int64_t>(&attr)) return static_cast<double>(*i);
  return std::get<double>(attr);
}

bool Rewriter::is_splat(ValueId v, double value) const {
  std::optional<double> known = splat(v);
  if (!known) return false;
  char stored[8], wanted[8];
  ir::store_element(dtype(v), stored, *known);
  ir::store_element(dtype(v), wanted, value);
  return std::memcmp(stored, wanted, ir::size_bytes(dtype(v))) == 0;
}

void Rewriter::place(Node node) {
  const bool constant =
      ops::is_constant(node, [&](ValueId v) { return is_constant_expression(v); });
  for (ValueId r : node.results) {
    def_[static_cast<size_t>(r)] = static_cast<int32_t>(emitted_.size());
    constant_[static_cast<size_t>(r)] = constant ? 1 : 0;
  }
  emitted_.push_back(std::move(node));
}

ValueId Rewriter::emit(std::string op, std::vector<ValueId> operands, ir::Attrs attrs,
                       ir::TensorType type) {
  return emit(std::move(op), std::move(operands), std::move(attrs),
              std::vector{std::move(type)})[0];
}

std::vector<ValueId> Rewriter::emit(std::string op, std::vector<ValueId> operands, ir::Attrs attrs,
                                    const std::vector<ir::TensorType>& types) {
  std::vector<ValueId> results;
  for (const auto& type : types) results.push_back(graph_.add_result(type));
  grow();
  for (ValueId v : operands) {
    if (v != kNoValue) ++uses_[static_cast<size_t>(v)];
  }
  place({std::move(op), std::move(operands), results, std::move(attrs)});
  return results;
}

ValueId Rewriter::emit_like(const Node& node, std::vector<ValueId> operands) {
  std::vector<ir::TensorType> types;
  for (ValueId r : node.results) types.push_back(type(r));
  return emit(node.op, std::move(operands), node.attrs, types)[0];
}

ValueId Rewriter::reshape(ValueId v, ir::Dims shape) {
  if (dims(v) == shape) return v;
  ir::TensorType out{dtype(v), shape};
  return emit("reshape", {v}, {{"shape", std::move(shape)}}, std::move(out));
}

ValueId Rewriter::literal(ir::TensorType type, std::string bytes) {
  ValueId v = graph_.add_literal(std::move(type), std::move(bytes));
  grow();
  return v;
}

bool Rewriter::replace(ValueId from, ValueId to) {
  const ir::TensorType &a = type(from), &b = type(to);
  bool agree = a.dtype == b.dtype && a.rank() == b.rank();
  for (size_t d = 0; agree && d < a.rank(); ++d) {
    agree = ops::compare(a.dims[d], b.dims[d]) != ops::DimOrder::kDifferent;
  }
  if (!agree) {
    throw Error(RM_INTERNAL,
                "[rewriter] expected a replacement of type " + a.str() + ", got " + b.str());
  }
  forward_[static_cast<size_t>(from)] = to;
  uses_[static_cast<size_t>(to)] += uses_[static_cast<size_t>(from)];
  uses_[static_cast<size_t>(from)] = 0;
  return true;
}

bool Rewriter::replace_all(const Node& node, const Node& like, std::vector<ValueId> operands) {
  const std::vector<ValueId> made = def(emit_like(like, std::move(operands)))->results;
  for (size_t i = 0; i < made.size(); ++i) replace(node.results[i], made[i]);
  return true;
}

void Rewriter::move_other_uses(ValueId from, ValueId to) {
  replace(from, to);
  --uses_[static_cast<size_t>(to)];
  uses_[static_cast<size_t>(from)] = 1;  // the current node, released when it is dropped
}

}  // namespace rm::passes
