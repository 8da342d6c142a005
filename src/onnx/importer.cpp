#include "onnx/importer.hpp"

#include <cstring>
#include <utility>

#include "base/error.hpp"
#include "ir/verify.hpp"
#include "ops/evaluate.hpp"
#include "ops/infer.hpp"
#include "ops/registry.hpp"

namespace rm::onnx {
namespace {

constexpr int64_t kMaxFolded = 4096;        // elements of a constant that is computed now
constexpr int64_t kMaxLiteralBytes = 4096;  // integers of shapes and indices, held in the program

const Table& table() {
  static const Table made = [] {
    Table t;
    add_elementwise(&t);
    add_shapes(&t);
    add_layouts(&t);
    add_layers(&t);
    return t;
  }();
  return made;
}

std::string label(const Node& node) {
  std::string out = node.domain.empty() ? "" : node.domain + ".";
  out += node.op;
  const std::string& name = node.name.empty() && !node.outputs.empty() ? node.outputs[0] : node.name;
  return out + " '" + name + "'";
}

[[noreturn]] void damaged(const std::string& message) {
  throw Error(RM_INVALID_ARGUMENT, "[onnx] expected " + message + "; try checking the file",
              "RM340");
}

int64_t element(const ir::Value& value, int64_t index) {
  const char* at = value.literal.data();
  if (value.type.dtype == ir::DType::kI32) {
    int32_t narrow;
    std::memcpy(&narrow, at + index * 4, sizeof(narrow));
    return narrow;
  }
  int64_t wide;
  std::memcpy(&wide, at + index * 8, sizeof(wide));
  return wide;
}

}  // namespace

// ---- the graph ------------------------------------------------------------------------------------

Imported import_model(std::string_view bytes) {
  const Model model = read_model(bytes);
  if (model.opset < 7 || model.opset > 28) {
    damaged("an opset from 7 to 28, got " + std::to_string(model.opset));
  }
  try {
    return Importer(model).run();
  } catch (const Error& error) {
    if (!error.reason().empty()) throw;
    throw Error(error.code(), error.what(), "RM341");
  }
}

Imported Importer::run() {
  add_initializers();
  add_inputs();
  for (const Node& n : model_.nodes) convert(n);
  for (const Port& port : model_.outputs) {
    auto it = values_.find(port.name);
    if (it == values_.end()) damaged("a node that computes the output '" + port.name + "', got none");
    graph().outputs.push_back(tensor(it->second));
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

void Importer::add_inputs() {
  for (const Port& port : model_.inputs) {
    if (values_.count(port.name) != 0) continue;  // older files list initializers as inputs
    const std::string where = "the input '" + port.name + "'";
    ir::TensorType t{dtype_of(port.dtype, where), {}};
    if (!port.has_shape) damaged("a shape of " + where + ", got none");
    for (const Size& size : port.dims) {
      if (size.value >= 0 && size.name.empty()) {
        if (size.value > (int64_t{1} << 40)) damaged("sizes that memory can hold for " + where);
        t.dims.emplace_back(size.value);
        continue;
      }
      const std::string fresh = "s" + std::to_string(graph().symbols.size());
      std::string& symbol = symbols_[size.name.empty() ? " " + fresh : size.name];
      if (symbol.empty()) {
        symbol = fresh;
        graph().symbols[fresh] = {1, INT64_MAX};
      }
      t.dims.push_back(Dim::symbol(symbol));
    }
    Entry made;
    made.id = graph().add_input("input" + std::to_string(out_.inputs.size()), std::move(t));
    values_[port.name] = made;
    out_.inputs.push_back(port.name);
  }
}

void Importer::add_initializers() {
  for (const Tensor& t : model_.initializers) {
    if (values_.count(t.name) != 0) damaged("one initializer '" + t.name + "', got two");
    Entry made;
    made.id = literal(t);
    values_[t.name] = made;
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
  if (w.name.empty()) w.name = "@constant";
  for (const Weight& other : out_.weights) {
    if (other.name == w.name) w.name = t.name + "@" + std::to_string(out_.weights.size());
  }
  const ValueId made = graph().add_weight(w.name, type);
  out_.weights.push_back(std::move(w));
  return made;
}

void Importer::convert(const Node& n) {
  node_ = &n;
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
  }
  for (const std::string& name : n.outputs) {
    if (!name.empty() && values_.count(name) == 0) refuse("one result", "the result '" + name + "'");
  }
}

void Importer::refuse(const std::string& expected, const std::string& got) const {
  throw Error(RM_UNIMPLEMENTED,
              "[onnx] expected " + expected + ", got " + got + " at " + label(*node_) +
                  "; try exporting without it",
              "RM341");
}

// ---- operands and results ---------------------------------------------------------------------------

bool Importer::has(size_t input) const {
  return input < node_->inputs.size() && !node_->inputs[input].empty();
}

Importer::Entry& Importer::entry(size_t input) {
  if (!has(input)) damaged("operand " + std::to_string(input) + " of " + label(*node_) + ", got none");
  auto it = values_.find(node_->inputs[input]);
  if (it == values_.end()) {
    damaged("nodes in the order of their use, got '" + node_->inputs[input] + "' at " +
            label(*node_) + " before it is computed");
  }
  return it->second;
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
    return e.id = graph().add_literal({ir::DType::kI64, e.is_scalar ? Dims{} : Dims{Dim(n)}}, bytes);
  }
  for (const Dim& d : *e.sizes) {
    ValueId v = op("dim_value", {}, {{"value", Dims{d}}});
    parts.push_back(e.is_scalar ? v : reshape(v, {Dim(1)}));
  }
  e.id = parts.size() == 1 ? parts[0] : op("concat", parts, {{"axis", int64_t{0}}});
  return e.id;
}

std::optional<Dims> Importer::sizes(size_t input) {
  Entry& e = entry(input);
  if (e.sizes) return e.sizes;
  const ir::Value& v = graph().value(e.id);
  const bool is_integer = v.type.dtype == ir::DType::kI64 || v.type.dtype == ir::DType::kI32;
  if (v.kind != ir::ValueKind::kLiteral || !is_integer || v.type.rank() > 1) return std::nullopt;
  Dims out;
  for (int64_t k = 0; k < v.type.num_elements(); ++k) out.emplace_back(element(v, k));
  return out;
}

Dims Importer::known(size_t input, const char* what) {
  std::optional<Dims> found = sizes(input);
  if (!found) refuse(std::string(what) + " known before the program runs", "values of a tensor");
  return *found;
}

Ints Importer::integers(size_t input, const char* what) {
  Ints out;
  for (const Dim& d : known(input, what)) {
    if (!d.is_static()) refuse(std::string(what) + " as a number", d.str());
    out.push_back(d.value());
  }
  return out;
}

void Importer::out(ValueId value, size_t output) {
  if (output >= node_->outputs.size()) return;
  Entry made;
  made.id = value;
  if (!values_.emplace(node_->outputs[output], made).second) {
    damaged("one value '" + node_->outputs[output] + "', got another at " + label(*node_));
  }
}

void Importer::out_sizes(Dims sizes, bool is_scalar, size_t output) {
  Entry made;
  made.sizes = std::move(sizes);
  made.is_scalar = is_scalar;
  if (!values_.emplace(node_->outputs.at(output), made).second) {
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

// ---- nodes of the program -----------------------------------------------------------------------------

ValueId Importer::op(std::string name, std::vector<ValueId> operands, ir::Attrs attrs) {
  ir::Node made{std::move(name), std::move(operands), {}, std::move(attrs)};
  std::vector<ir::TensorType> types = ops::infer(graph(), made);
  return folded(graph().append(made.op, made.operands, made.attrs, types[0]));
}

ValueId Importer::typed(std::string name, std::vector<ValueId> operands, ir::Attrs attrs,
                        ir::TensorType t) {
  return folded(graph().append(std::move(name), std::move(operands), std::move(attrs), std::move(t)));
}

// A small value that depends on literals alone is computed now: shapes are often computed so.
ValueId Importer::folded(ValueId value) {
  const ir::Node& made = graph().nodes.back();
  const ir::TensorType t = type(value);
  if (made.op == "conv" || made.op == "pool") return value;  // windows may be far larger than results
  if (!t.is_static() || made.operands.empty() || t.num_elements() > kMaxFolded) return value;
  std::vector<ops::HostTensor> held;
  for (ValueId v : made.operands) {
    if (v == ir::kNoValue || graph().value(v).kind != ir::ValueKind::kLiteral) return value;
    held.push_back({type(v), graph().value(v).literal});
  }
  ops::HostOperands operands;
  for (const ops::HostTensor& h : held) operands.push_back(&h);
  std::vector<ops::HostTensor> results = ops::evaluate_node(graph(), made, operands);
  return graph().add_literal(t, results[0].bytes);
}

ValueId Importer::number(ValueId like, double value) {
  return ir::add_scalar(graph(), type(like).dtype, value);
}
ValueId Importer::cast(ValueId v, ir::DType to) {
  return type(v).dtype == to ? v : typed("cast", {v}, {}, {to, dims(v)});
}
ValueId Importer::reshape(ValueId v, Dims shape) {
  return dims(v) == shape ? v : op("reshape", {v}, {{"shape", std::move(shape)}});
}
ValueId Importer::permute(ValueId v, Ints axes) {
  bool is_same = true;
  for (size_t k = 0; k < axes.size(); ++k) is_same = is_same && axes[k] == static_cast<int64_t>(k);
  return is_same ? v : op("permute", {v}, {{"axes", std::move(axes)}});
}
ValueId Importer::reduce(std::string kind, ValueId v, const Ints& axes, bool keepdim) {
  return op("reduce", {v},
            {{"kind", std::move(kind)}, {"axes", axes}, {"keepdim", static_cast<int64_t>(keepdim)}});
}
ValueId Importer::slice(ValueId v, int64_t axis, Dim start, Dim stop, int64_t step) {
  return op("slice", {v},
            {{"axis", axis}, {"start", Dims{start}}, {"stop", Dims{stop}}, {"step", step}});
}

}  // namespace rm::onnx
