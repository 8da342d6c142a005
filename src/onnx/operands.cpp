// What a converter reads of its node and gives back: operands as tensors or as known numbers,
// attributes, results; and what it says when something is not known or not possible.
#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "onnx/errors.hpp"
#include "onnx/importer.hpp"

namespace rm::onnx {

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
