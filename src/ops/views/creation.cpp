// iota, full, dim_value: tensors made from attributes alone.
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Types written(const Graph& graph, const Node& node) { return {result_type(graph, node)}; }

const ir::Dim& one_dim(const Node& node, const char* name) {
  const ir::Dims& dims = node.dims(name);
  if (dims.size() != 1) fail(node, std::string(name) + " of one dim", dims_text(dims));
  return dims[0];
}

Types infer_iota(const Graph& graph, const Node& node) {
  const TensorType& out = result_type(graph, node);
  check_rank(node, out, 1, "a result");
  if (!is_integer(out.dtype)) fail(node, "an integer result", out.str() + "; try a cast");
  one_dim(node, "start");
  return {out};
}

std::vector<HostTensor> reference_iota(const Node& node, const HostOperands&, const Types& out) {
  int64_t start = one_dim(node, "start").value(), step = node.i_or("step", 1);
  std::vector<int64_t> values;
  for (int64_t i = 0; i < out[0].num_elements(); ++i) values.push_back(start + i * step);
  return {from_ints(out[0], values)};
}

Types infer_full(const Graph& graph, const Node& node) {
  auto it = node.attrs.find("value");
  if (it == node.attrs.end() || it->second.index() > 1) {
    fail(node, "attribute 'value' of kind int or float",
         it == node.attrs.end() ? "none" : "another kind");
  }
  return written(graph, node);
}

std::vector<HostTensor> reference_full(const Node& node, const HostOperands&, const Types& out) {
  auto n = static_cast<size_t>(out[0].num_elements());
  if (const auto* value = std::get_if<int64_t>(&node.attrs.at("value"))) {
    if (!ir::is_floating(out[0].dtype)) return {from_ints(out[0], std::vector<int64_t>(n, *value))};
    return {from_doubles(out[0], std::vector<double>(n, static_cast<double>(*value)))};
  }
  return {from_doubles(out[0], std::vector<double>(n, node.f("value")))};
}

Types infer_dim_value(const Graph&, const Node& node) {
  one_dim(node, "value");
  return {{ir::DType::kI64, {}}};
}

std::vector<HostTensor> reference_dim_value(const Node& node, const HostOperands&,
                                            const Types& out) {
  return {from_ints(out[0], {one_dim(node, "value").value()})};
}

}  // namespace

extern const OpDef kIota{"iota", 0, 0, kNone, infer_iota, copy_cost, reference_iota};
extern const OpDef kFull{"full", 0, 0, kNone, infer_full, copy_cost, reference_full};
extern const OpDef kDimValue{"dim_value",        0, 0, kNone, infer_dim_value, copy_cost,
                             reference_dim_value};

}  // namespace rm::ops
