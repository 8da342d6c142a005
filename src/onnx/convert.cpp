// Which converter a node gets: an operator's, or the nodes of its function or subgraph in its
// place.
#include <set>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "onnx/errors.hpp"
#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

constexpr int64_t kMaxConverted = int64_t{1}
                                  << 18;  // nodes, those of calls and loops counted each time
constexpr int kMaxDepth = 64;

const Table& table() {
  static const Table made = [] {
    Table t;
    add_elementwise(&t);
    add_reductions(&t);
    add_shapes(&t);
    add_layouts(&t);
    add_layers(&t);
    add_pools(&t);
    add_norms(&t);
    add_control(&t);
    add_losses(&t);
    add_attention(&t);
    add_sampling(&t);
    add_scatter(&t);
    add_quantised(&t);
    add_recurrent(&t);
    add_einsum(&t);
    add_places(&t);
    add_selection(&t);
    add_ml(&t);
    return t;
  }();
  return made;
}

// What meant before opset 7 what it means since; operands of most others were broadcast by
// attributes.
bool is_known_before_7(const std::string& op) {
  static const std::set<std::string_view> kOperators{
      "Abs",  "Ceil",     "Conv",     "Exp",      "Flatten", "Floor",      "GlobalAveragePool",
      "Log",  "Identity", "MatMul",   "Neg",      "Not",     "Reciprocal", "GlobalMaxPool",
      "Relu", "Sigmoid",  "Softplus", "Softsign", "Sqrt",    "Tanh",       "Transpose"};
  return kOperators.count(op) != 0;
}

}  // namespace

void Importer::convert(const Node& n) {
  if (++converted_ > kMaxConverted) {
    refuse("at most " + std::to_string(kMaxConverted) + " nodes", "calls or loops of more");
  }
  const Node* before = std::exchange(node_, &n);
  Node resolved;  // attributes that name those of the call
  for (const auto& [name, a] : n.attributes) {
    if (a.reference.empty()) continue;
    if (resolved.op.empty()) resolved = n;
    resolved.attributes.erase(name);
    const Scope* call = scope_;
    while (call->function == nullptr && call->outer != nullptr) call = call->outer;
    if (call->function == nullptr) damaged("an attribute '" + name + "' with a value");
    auto it = call->attributes->find(a.reference);
    if (it != call->attributes->end()) {
      resolved.attributes[name] = it->second;
    } else if (auto d = call->function->defaults.find(a.reference);
               d != call->function->defaults.end()) {
      resolved.attributes[name] = d->second;
    }
  }
  if (!resolved.op.empty()) node_ = &resolved;
  auto f = functions_.find(n.domain + "." + n.op);
  if (f != functions_.end()) {
    call(*f->second, *node_);
  } else {
    convert_plain(*node_);
  }
  node_ = before;
}

void Importer::convert_plain(const Node& n) {
  const bool is_default = n.domain.empty() || n.domain == "ai.onnx";
  auto it = table().find(is_default ? n.op : n.domain + "." + n.op);
  if (it == table().end()) refuse("an operator that programs have", label(n));
  if (is_default && opset_ < 7 && !is_known_before_7(n.op)) {
    refuse("an opset from 7 to 28 for this operator", std::to_string(opset_));
  }
  if (n.outputs.empty()) damaged("results of " + label(n) + ", got none");
  try {
    it->second(*this);
  } catch (const Error& error) {
    if (!error.reason().empty()) throw;
    throw Error(error.code(), std::string(error.what()) + " (" + label(n) + ")", "RM341");
  } catch (const std::out_of_range&) {  // an `at` of a list that is too short
    refuse("operands and attributes of as many axes as it needs", "fewer");
  }
  for (const std::string& name : n.outputs) {
    if (!name.empty() && scope_->values.count(name) == 0) {
      refuse("another result", "the result '" + name + "'");
    }
  }
}

struct Importer::Enter {
  Importer& importer;
  Scope* before;
  int64_t opset;
  Enter(Importer* m, Scope* scope) : importer(*m), before(m->scope_), opset(m->opset_) {
    if (++m->depth_ > kMaxDepth) {
      m->refuse("functions and subgraphs that nest " + std::to_string(kMaxDepth) + " deep at most",
                "more, or a function that calls itself");
    }
    m->scope_ = scope;
  }
  ~Enter() {
    importer.scope_ = before;
    importer.opset_ = opset;
    --importer.depth_;
  }
  Enter(const Enter&) = delete;
  Enter& operator=(const Enter&) = delete;
};

void Importer::call(const Function& f, const Node& n) {
  if (n.inputs.size() > f.inputs.size() || n.outputs.size() > f.outputs.size()) {
    damaged("operands and results of the function '" + f.name + "', got more at " + label(n));
  }
  Scope inner;
  inner.attributes = &n.attributes;
  inner.function = &f;
  for (size_t k = 0; k < n.inputs.size(); ++k) {
    if (has(k)) inner.values[f.inputs[k]] = entry(k);
  }
  std::vector<Entry> results;
  {
    Enter scope(this, &inner);
    if (f.opset != 0) opset_ = f.opset;
    for (const Node& step : f.nodes) convert(step);
    for (size_t k = 0; k < n.outputs.size(); ++k) {
      Entry* found = find(f.outputs[k]);
      if (found == nullptr)
        damaged("a result '" + f.outputs[k] + "' of the function '" + f.name + "'");
      results.push_back(*found);
    }
  }
  for (size_t k = 0; k < results.size(); ++k) {
    if (!n.outputs[k].empty()) out_entry(results[k], k);
  }
}

std::vector<Importer::Entry> Importer::inlined(const Graph& g, const std::vector<Entry>& inputs) {
  if (inputs.size() != g.inputs.size()) {
    refuse(std::to_string(g.inputs.size()) + " inputs of a subgraph",
           std::to_string(inputs.size()));
  }
  Scope inner;
  inner.outer = scope_;
  for (size_t k = 0; k < inputs.size(); ++k) inner.values[g.inputs[k].name] = inputs[k];
  Enter scope(this, &inner);
  add_initializers(g);
  for (const Node& step : g.nodes) convert(step);
  std::vector<Entry> out;
  for (const Port& port : g.outputs) {
    Entry* found = find(port.name);
    if (found == nullptr) damaged("a node that computes the output '" + port.name + "', got none");
    out.push_back(*found);
  }
  return out;
}

}  // namespace rm::onnx
