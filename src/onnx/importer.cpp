// What a model gives to the program: inputs, weights and outputs, and what has to be known of them.
#include "onnx/importer.hpp"

#include <utility>

#include "base/error.hpp"
#include "ir/verify.hpp"
#include "onnx/errors.hpp"
#include "ops/infer.hpp"
#include "ops/registry.hpp"

namespace rm::onnx {

Imported import_model(std::string_view bytes, const GivenInputs& given) {
  const Model model = read_model(bytes);
  if (model.opset < 0 || model.opset > 28) {  // 0: of other domains alone
    damaged("an opset from 1 to 28, got " + std::to_string(model.opset));
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
    out_.ports.push_back(port);
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

}  // namespace rm::onnx
