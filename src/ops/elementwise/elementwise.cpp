// Unary, binary, where and cast. Binary operands have one dtype and broadcast.
#include "ops/elementwise/elementwise.hpp"

#include "ir/scalar.hpp"
#include "ops/ewise_opcodes.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::DType;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

void check_class(const Node& node, const EwiseOpcode& row, const TensorType& type) {
  const ewise::Operands meant = ewise::operands_of(row.opcode);
  if (meant == ewise::Operands::kFloat && !ir::is_floating(type.dtype)) {
    fail(node, "floating operands", type.str() + "; try a cast");
  }
  if (meant == ewise::Operands::kInteger && ir::is_floating(type.dtype)) {
    fail(node, "integer or bool operands", type.str() + "; try a cast");
  }
}

Types infer_unary(const Graph& graph, const Node& node) {
  const EwiseOpcode& row = *find_opcode(node.op);
  TensorType out = operand_type(graph, node, 0);
  check_class(node, row, out);
  if (row.is_logical) out.dtype = DType::kBool;
  return {out};
}

Types infer_binary(const Graph& graph, const Node& node) {
  const EwiseOpcode& row = *find_opcode(node.op);
  const TensorType &a = operand_type(graph, node, 0), &b = operand_type(graph, node, 1);
  check_class(node, row, a);
  check_dtype(node, b, a.dtype, "both operands");
  return {{row.is_logical ? DType::kBool : a.dtype, broadcast(node, a.dims, b.dims)}};
}

Types infer_where(const Graph& graph, const Node& node) {
  const TensorType &c = operand_type(graph, node, 0), &a = operand_type(graph, node, 1),
                   &b = operand_type(graph, node, 2);
  check_dtype(node, c, DType::kBool, "the condition");
  check_dtype(node, b, a.dtype, "both choices");
  return {{a.dtype, broadcast(node, broadcast(node, c.dims, a.dims), b.dims)}};
}

Types infer_cast(const Graph& graph, const Node& node) {
  return {{result_type(graph, node).dtype, operand_type(graph, node, 0).dims}};
}

Cost elementwise_cost(const Graph& graph, const Node& node) {
  return {static_cast<double>(result_type(graph, node).num_elements()), traffic_bytes(graph, node)};
}

// The operand that fixes the class: for `where` the condition does not.
size_t class_operand(const Node& node) { return node.op == "where" ? 1 : 0; }

std::vector<HostTensor> reference(const Node& node, const HostOperands& in, const Types& out) {
  const EwiseOpcode& row = *find_opcode(node.op);
  EwiseClass cls = ewise_class(in[class_operand(node)]->type.dtype);
  std::vector<std::vector<int64_t>> at;
  for (const HostTensor* x : in) at.push_back(broadcast_offsets(x->type.dims, out[0].dims));
  HostTensor y = zeros(out[0]);
  for (int64_t i = 0; i < y.size(); ++i) {
    double f[3] = {0, 0, 0};
    int64_t n[3] = {0, 0, 0};
    for (size_t k = 0; k < in.size(); ++k) {
      const char* p = in[k]->at(at[k][static_cast<size_t>(i)]);
      if (cls == EwiseClass::kInt) n[k] = ir::load_int(in[k]->type.dtype, p);
      f[k] = ir::load_element(in[k]->type.dtype, p);
    }
    if (cls == EwiseClass::kInt) {
      ir::store_int(out[0].dtype, y.at(i), apply_int(row.opcode, n[0], n[1], n[2]));
    } else {
      ir::store_element(out[0].dtype, y.at(i), apply_float(row.opcode, f[0], f[1], f[2]));
    }
  }
  return {y};
}

std::vector<HostTensor> reference_cast(const Node&, const HostOperands& in, const Types& out) {
  DType from = in[0]->type.dtype;
  HostTensor y = zeros(out[0]);
  for (int64_t i = 0; i < y.size(); ++i) {
    // i64 -> i64-like targets keep every bit; anything with a float goes through double.
    if (ir::is_floating(from) || ir::is_floating(out[0].dtype)) {
      ir::store_element(out[0].dtype, y.at(i), ir::load_element(from, in[0]->at(i)));
    } else {
      ir::store_int(out[0].dtype, y.at(i), ir::load_int(from, in[0]->at(i)));
    }
  }
  return {y};
}

}  // namespace

std::vector<OpDef> elementwise_ops() {
  std::vector<OpDef> out;
  for (const EwiseOpcode& row : ewise_opcodes()) {
    if (row.arity == 0 || row.opcode == ewise::kCopy || row.name == "fma") continue;  // programs only
    auto* infer = row.arity == 1 ? infer_unary : row.arity == 2 ? infer_binary : infer_where;
    uint32_t traits = kElementwise | (row.commutative ? kCommutative : 0u);
    out.push_back({row.name, row.arity, row.arity, traits, infer, elementwise_cost, reference});
  }
  return out;
}

extern const OpDef kCast{"cast", 1, 1, kElementwise, infer_cast, elementwise_cost, reference_cast};

}  // namespace rm::ops
