// reshape, permute, expand: the same elements under another shape; bitcast: under another type.
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Dim;
using ir::Dims;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Types infer_reshape(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, 0);
  const Dims& shape = node.dims("shape");
  for (const Dim& d : shape) {
    if (d.is_static() && d.value() < 0) fail(node, "sizes >= 0", dims_text(shape));
  }
  if (compare(ir::product(x.dims), ir::product(shape)) == DimOrder::kDifferent) {
    fail(node, "a shape with as many elements as " + x.str(), dims_text(shape));
  }
  return {{x.dtype, shape}};
}

std::vector<HostTensor> reference_reshape(const Node&, const HostOperands& in, const Types& out) {
  return {{out[0], in[0]->bytes}};
}

Types infer_permute(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, 0);
  const auto& axes = node.ints("axes");
  if (axes.size() != x.rank()) {
    fail(node, "one axis per dimension of " + x.str(), std::to_string(axes.size()));
  }
  std::vector<char> seen(x.rank(), 0);
  TensorType out{x.dtype, {}};
  for (int64_t a : axes) {
    if (a < 0 || a >= static_cast<int64_t>(x.rank()) || seen[static_cast<size_t>(a)]++ != 0) {
      fail(node, "axes that are a permutation", std::to_string(a));
    }
    out.dims.push_back(x.dims[static_cast<size_t>(a)]);
  }
  return {out};
}

std::vector<HostTensor> reference_permute(const Node& node, const HostOperands& in,
                                          const Types& out) {
  std::vector<int64_t> own = contiguous_strides(sizes(in[0]->type.dims)), strides;
  for (int64_t a : node.ints("axes")) strides.push_back(own[static_cast<size_t>(a)]);
  return {take(*in[0], out[0], strided_offsets(sizes(out[0].dims), strides))};
}

Types infer_expand(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, 0);
  check_broadcasts_to(node, x.dims, node.dims("shape"));
  return {{x.dtype, node.dims("shape")}};
}

std::vector<HostTensor> reference_expand(const Node&, const HostOperands& in, const Types& out) {
  return {take(*in[0], out[0], broadcast_offsets(in[0]->type.dims, out[0].dims))};
}

Types infer_bitcast(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, 0);
  const ir::DType to = result_type(graph, node).dtype;
  if (ir::size_bytes(to) != ir::size_bytes(x.dtype) || to == ir::DType::kBool) {
    fail(node, "a type of as many bytes, not bool", std::string(ir::name(to)) + " from " + x.str());
  }
  return {{to, x.dims}};
}

std::vector<HostTensor> reference_bitcast(const Node&, const HostOperands& in, const Types& out) {
  return {{out[0], in[0]->bytes}};
}

}  // namespace

extern const OpDef kReshape{"reshape", 1, 1, kView, infer_reshape, view_cost, reference_reshape};
extern const OpDef kPermute{"permute", 1, 1, kView, infer_permute, view_cost, reference_permute};
extern const OpDef kExpand{"expand", 1, 1, kView, infer_expand, view_cost, reference_expand};
extern const OpDef kBitcast{"bitcast", 1, 1, kView, infer_bitcast, view_cost, reference_bitcast};

}  // namespace rm::ops
