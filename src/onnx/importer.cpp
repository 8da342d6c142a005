#include "onnx/importer.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "ir/verify.hpp"
#include "ops/infer.hpp"
#include "ops/registry.hpp"

namespace rm::onnx {
namespace {

constexpr int64_t kMaxLiteralBytes = 4096;  // integers of shapes and indices, held in the program
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
    return t;
  }();
  return made;
}

std::string label(const Node& node) {
  std::string out = node.domain.empty() ? "" : node.domain + ".";
  out += node.op;
  const std::string& name =
      node.name.empty() && !node.outputs.empty() ? node.outputs[0] : node.name;
  return out + " '" + name + "'";
}

[[noreturn]] void damaged(const std::string& message) {
  throw Error(RM_INVALID_ARGUMENT, "[onnx] expected " + message + "; try checking the file",
              "RM340");
}

}  // namespace

// ---- the graph
// ------------------------------------------------------------------------------------

Imported import_model(std::string_view bytes, const GivenInputs& given) {
  const Model model = read_model(bytes);
  if (model.opset < 7 || model.opset > 28) {
    damaged("an opset from 7 to 28, got " + std::to_string(model.opset));
  }
  try {
    return Importer(model, given).run();
  } catch (const Missing& missing) {
    Imported out;
    for (const Port& port : model.graph.inputs) {
      bool is_constant = false;
      for (const Tensor& t : model.graph.initializers)
        is_constant = is_constant || t.name == port.name;
      if (is_constant) continue;
      out.inputs.push_back(port.name);
      out.ports.push_back(port);
    }
    for (const Port& port : model.graph.outputs) out.outputs.push_back(port.name);
    out.needed_values = missing.values;
    out.needs_sizes = missing.sizes;
    return out;
  } catch (const Error& error) {
    if (!error.reason().empty()) throw;
    throw Error(error.code(), error.what(), "RM341");
  }
}

Importer::Importer(const Model& model, const GivenInputs& given)
    : model_(model), given_(given), opset_(model.opset) {
  for (const Function& f : model.functions) {
    if (!functions_.emplace(f.domain + "." + f.name, &f).second) {
      damaged("one function '" + f.name + "', got two");
    }
  }
}

Imported Importer::run() {
  add_initializers(model_.graph);
  add_inputs();
  for (const Node& n : model_.graph.nodes) convert(n);
  for (const Port& port : model_.graph.outputs) {
    Entry* found = find(port.name);
    if (found == nullptr) damaged("a node that computes the output '" + port.name + "', got none");
    graph().outputs.push_back(tensor(*found));
    out_.outputs.push_back(port.name);
  }
  graph().compact();
  ir::verify(graph());
  ops::infer_and_check(graph());
  std::vector<Weight> used;
  std::set<std::string, std::less<>> names;
  for (ValueId w : graph().weights()) names.insert(graph().value(w).name);
  for (Weight& w : out_.weights) {
    if (names.count(w.name) != 0) used.push_back(std::move(w));
  }
  out_.weights = std::move(used);
  return std::move(out_);
}

// Inputs whose values are given come first: their sizes may be those that others name.
void Importer::add_inputs() {
  std::vector<const Port*> ports;
  for (const Port& port : model_.graph.inputs) {
    if (top_.values.count(port.name) != 0) continue;  // older files list initializers as inputs
    ports.push_back(&port);
    out_.inputs.push_back(port.name);
  }
  for (bool with_values : {true, false}) {
    for (const Port* port : ports) add_input(*port, with_values);
  }
}

void Importer::add_input(const Port& port, bool with_values) {
  auto found = given_.find(port.name);
  const Given* given = found == given_.end() ? nullptr : &found->second;
  if ((given != nullptr && given->bytes.has_value()) != with_values) return;
  const std::string where = "the input '" + port.name + "'";
  ir::TensorType t{dtype_of(port.dtype, where), {}};
  if (given != nullptr) {
    if (port.has_shape && port.dims.size() != given->sizes.size()) {
      throw Error(RM_INVALID_ARGUMENT, "[onnx] expected " + std::to_string(port.dims.size()) +
                                           " axes of " + where + ", got " +
                                           std::to_string(given->sizes.size()));
    }
    for (size_t k = 0; k < given->sizes.size(); ++k) {
      const Dim d(given->sizes[k]);
      const Size named = port.has_shape ? port.dims[k] : Size{};
      const bool is_fixed = named.value >= 0 && named.name.empty();
      const Dim& wanted = is_fixed             ? Dim(named.value)
                          : named.name.empty() ? d
                                               : symbols_.emplace(named.name, d).first->second;
      if (wanted != d) {
        throw Error(RM_INVALID_ARGUMENT, "[onnx] expected " + wanted.str() + " along axis " +
                                             std::to_string(k) + " of " + where + ", got " +
                                             d.str());
      }
      t.dims.push_back(d);
    }
  } else {
    if (!port.has_shape) throw Missing{{}, true};
    for (const Size& size : port.dims) {
      if (size.value >= 0 && size.name.empty()) {
        if (size.value > (int64_t{1} << 40)) damaged("sizes that memory can hold for " + where);
        t.dims.emplace_back(size.value);
        continue;
      }
      const std::string fresh = "s" + std::to_string(graph().symbols.size());
      auto [symbol, is_new] =
          symbols_.emplace(size.name.empty() ? " " + fresh : size.name, Dim::symbol(fresh));
      if (is_new) graph().symbols[fresh] = {1, INT64_MAX};
      t.dims.push_back(symbol->second);
    }
  }
  Entry made;
  if (with_values) {
    if (static_cast<int64_t>(given->bytes->size()) != t.num_bytes()) damaged("values of " + where);
    made.id = graph().add_literal(std::move(t), *given->bytes);
  } else {
    made.id = graph().add_input("input" + std::to_string(graph().inputs().size()), std::move(t));
    input_names_[made.id] = port.name;
  }
  top_.values[port.name] = made;
}

void Importer::add_initializers(const Graph& from) {
  for (const Tensor& t : from.initializers) {
    Entry made;
    made.id = literal(t);
    if (!scope_->values.emplace(t.name, made).second) {
      damaged("one initializer '" + t.name + "', got two");
    }
  }
}

ValueId Importer::literal(const Tensor& t) {
  ir::TensorType type{dtype_of(t.dtype, "'" + t.name + "'"), {}};
  const int64_t size = tensor_size(t);
  for (int64_t d : t.dims) type.dims.emplace_back(d);
  const bool is_small = ir::is_floating(type.dtype)
                            ? size <= static_cast<int64_t>(ir::size_bytes(type.dtype))
                            : size <= kMaxLiteralBytes;
  Weight w;
  w.name = t.name;
  w.type = type;
  if (t.is_external) {
    auto text = [&](const char* key) {
      auto it = t.external.find(key);
      return it == t.external.end() ? std::string() : it->second;
    };
    w.location = text("location");
    const std::string offset = text("offset");
    if (offset.size() > 15 || offset.find_first_not_of("0123456789") != std::string::npos) {
      damaged("an offset in bytes of '" + t.name + "', got '" + offset + "'");
    }
    w.offset = offset.empty() ? 0 : std::stoll(offset);
    if (w.location.empty()) damaged("the file of '" + t.name + "', got none");
  } else {
    w.in_file = tensor_bytes(t, &w.decoded);
    if (is_small) return graph().add_literal(type, std::string(w.in_file));
    if (!w.decoded.empty()) w.in_file = {};
  }
  return add_weight(std::move(w));
}

ValueId Importer::add_weight(Weight w) {
  if (w.name.empty()) w.name = "@constant";
  if (!weight_names_.insert(w.name).second) {
    w.name += "@" + std::to_string(out_.weights.size());
    while (!weight_names_.insert(w.name).second) w.name += "@";
  }
  const ValueId made = graph().add_weight(w.name, w.type);
  weight_numbers_[made] = out_.weights.size();
  out_.weights.push_back(std::move(w));
  return made;
}

// ---- nodes
// ------------------------------------------------------------------------------------------

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
  auto it = table().find(n.op);
  if ((!n.domain.empty() && n.domain != "ai.onnx") || it == table().end()) {
    refuse("an operator that programs have", label(n));
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

bool Importer::condition(Entry& e) {
  const ValueId v = tensor(e);
  std::optional<ops::HostTensor> known = constant(e);
  if (!known) ask(v, "a condition");
  if (type(v).num_elements() != 1) refuse("one condition", type(v).str());
  return ir::literal_element(graph(), v) != 0;
}

void Importer::refuse(const std::string& expected, const std::string& got) const {
  throw Error(RM_UNIMPLEMENTED,
              "[onnx] expected " + expected + ", got " + got + " at " + label(*node_) +
                  "; try exporting without it",
              "RM341");
}

// ---- operands and results
// ---------------------------------------------------------------------------

// An operand may also be absent because the call of the function left it out.
bool Importer::has(size_t input) const {
  if (input >= node_->inputs.size() || node_->inputs[input].empty()) return false;
  const Function* f = scope_->function;
  if (f == nullptr || scope_->values.count(node_->inputs[input]) != 0) return true;
  return std::find(f->inputs.begin(), f->inputs.end(), node_->inputs[input]) == f->inputs.end();
}

bool Importer::wants(size_t output) const {
  return output < node_->outputs.size() && !node_->outputs[output].empty();
}

Importer::Entry* Importer::find(std::string_view name) {
  for (Scope* scope = scope_; scope != nullptr; scope = scope->outer) {
    auto it = scope->values.find(name);
    if (it != scope->values.end()) return &it->second;
  }
  return nullptr;
}

Importer::Entry& Importer::entry(size_t input) {
  if (!has(input))
    damaged("operand " + std::to_string(input) + " of " + label(*node_) + ", got none");
  Entry* found = find(node_->inputs[input]);
  if (found == nullptr) {
    damaged("nodes in the order of their use, got '" + node_->inputs[input] + "' at " +
            label(*node_) + " before it is computed");
  }
  return *found;
}

ValueId Importer::in(size_t input) { return tensor(entry(input)); }

bool Importer::is_scalar(size_t input) {
  Entry& e = entry(input);
  return e.id == ir::kNoValue ? e.is_scalar : rank(e.id) == 0;
}

ValueId Importer::tensor(Entry& e) {
  if (e.id != ir::kNoValue) return e.id;
  std::vector<ValueId> parts;
  bool is_static = true;
  std::string bytes;
  for (const Dim& d : *e.sizes) {
    is_static = is_static && d.is_static();
    const int64_t v = d.value_or(0);
    bytes.append(reinterpret_cast<const char*>(&v), sizeof(v));
  }
  const auto n = static_cast<int64_t>(e.sizes->size());
  if (is_static) {
    return e.id =
               graph().add_literal({ir::DType::kI64, e.is_scalar ? Dims{} : Dims{Dim(n)}}, bytes);
  }
  for (const Dim& d : *e.sizes) {
    ValueId v = op("dim_value", {}, {{"value", Dims{d}}});
    parts.push_back(e.is_scalar ? v : reshape(v, {Dim(1)}));
  }
  e.id = parts.size() == 1 ? parts[0] : op("concat", parts, {{"axis", int64_t{0}}});
  return e.id;
}

std::optional<ops::HostTensor> Importer::constant(const Entry& e) const {
  const ir::Value& v = out_.graph.value(e.id);
  if (v.kind == ir::ValueKind::kLiteral) return ops::HostTensor{v.type, v.literal};
  auto it = weight_numbers_.find(e.id);
  if (it == weight_numbers_.end()) return std::nullopt;
  const Weight& w = out_.weights[it->second];
  if (w.type.num_bytes() > kMaxLiteralBytes || !w.location.empty()) return std::nullopt;
  return ops::HostTensor{w.type, w.in_file.empty() ? w.decoded : std::string(w.in_file)};
}

std::optional<Dims> Importer::numbers(size_t input) {
  Entry& e = entry(input);
  if (e.sizes) return e.sizes;
  const ir::TensorType t = type(e.id);
  const bool is_integer = t.dtype == ir::DType::kI64 || t.dtype == ir::DType::kI32;
  if (!is_integer || t.rank() > 1) return std::nullopt;
  std::optional<ops::HostTensor> known = constant(e);
  if (!known) return std::nullopt;
  const Ints values = ops::to_ints(*known);
  return Dims(values.begin(), values.end());
}

std::optional<Dims> Importer::sizes(size_t input) {
  Entry& e = entry(input);
  if (!e.sizes && dtype(e.id) != ir::DType::kI64) return std::nullopt;
  return numbers(input);
}

Dims Importer::known(size_t input, const char* what) {
  std::optional<Dims> found = numbers(input);
  if (!found) ask(in(input), what);
  return *found;
}

Ints Importer::integers(size_t input, const char* what) {
  Ints out;
  for (const Dim& d : known(input, what)) out.push_back(fixed(d));
  return out;
}

int64_t Importer::integer(size_t input, const char* what) {
  const Ints found = integers(input, what);
  if (found.size() != 1) refuse(std::string("one number as ") + what, std::to_string(found.size()));
  return found[0];
}

std::vector<double> Importer::reals(size_t input, const char* what) {
  const ValueId v = in(input);
  std::optional<ops::HostTensor> known = constant(entry(input));
  if (!known) ask(v, what);
  return ops::to_doubles(*known);
}

int64_t Importer::fixed(const Dim& d) const {
  if (!d.is_static()) throw Missing{{}, true};
  return d.value();
}

// What `value` is computed from decides what has to be known of the inputs.
void Importer::ask(ValueId value, const char* what) const {
  Missing missing;
  std::set<ValueId> wanted{value};
  bool is_known = true;
  for (auto n = out_.graph.nodes.rbegin(); n != out_.graph.nodes.rend(); ++n) {
    bool is_wanted = false;
    for (ValueId v : n->results) is_wanted = is_wanted || wanted.count(v) != 0;
    if (!is_wanted) continue;
    missing.sizes = missing.sizes || !type(n->results[0]).is_static() ||
                    (n->op == "dim_value" && !n->dims("value")[0].is_static());
    for (ValueId v : n->operands) {
      if (v != ir::kNoValue) wanted.insert(v);
    }
  }
  for (ValueId v : wanted) {
    auto name = input_names_.find(v);
    if (name == input_names_.end()) continue;
    const ir::TensorType t = type(v);
    if (!t.is_static()) {
      missing.sizes = true;
    } else if (t.num_bytes() > kMaxLiteralBytes) {
      is_known = false;  // no longer a number of sizes, but data
    } else {
      missing.values.insert(name->second);
    }
  }
  if (is_known && (missing.sizes || !missing.values.empty())) throw missing;
  throw Error(RM_UNIMPLEMENTED,
              std::string("[onnx] expected ") + what +
                  " known before the program runs, got values " + "that it computes at " +
                  label(*node_) + "; try exporting with constants there",
              "RM342");
}

void Importer::out(ValueId value, size_t output) {
  Entry made;
  made.id = value;
  out_entry(std::move(made), output);
}

void Importer::out_sizes(Dims sizes, bool is_scalar, size_t output) {
  Entry made;
  made.sizes = std::move(sizes);
  made.is_scalar = is_scalar;
  out_entry(std::move(made), output);
}

void Importer::out_entry(Entry made, size_t output) {
  if (!wants(output)) return;
  if (!scope_->values.emplace(node_->outputs[output], std::move(made)).second) {
    damaged("one value '" + node_->outputs[output] + "', got another at " + label(*node_));
  }
}

const Attribute* Importer::attribute(std::string_view name) const {
  auto it = node_->attributes.find(name);
  return it == node_->attributes.end() ? nullptr : &it->second;
}
int64_t Importer::i(std::string_view name, int64_t otherwise) const {
  const Attribute* a = attribute(name);
  return a == nullptr ? otherwise : a->integer;
}
double Importer::f(std::string_view name, double otherwise) const {
  const Attribute* a = attribute(name);
  return a == nullptr ? otherwise : a->real;
}
std::string Importer::s(std::string_view name, std::string_view otherwise) const {
  const Attribute* a = attribute(name);
  return a == nullptr ? std::string(otherwise) : a->text;
}
std::optional<Ints> Importer::ints(std::string_view name) const {
  const Attribute* a = attribute(name);
  if (a == nullptr) return std::nullopt;
  return a->integers;
}

int64_t Importer::axis(int64_t axis, size_t rank) const {
  const auto n = static_cast<int64_t>(rank);
  if (axis < -n || axis >= n) refuse("an axis below " + std::to_string(n), std::to_string(axis));
  return axis < 0 ? axis + n : axis;
}

std::optional<Ints> Importer::axes(size_t input, size_t rank) {
  std::optional<Ints> out = ints("axes");
  if (!out && has(input)) out = integers(input, "axes");
  if (out) {
    for (int64_t& a : *out) a = axis(a, rank);
  }
  return out;
}

}  // namespace rm::onnx
