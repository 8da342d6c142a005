// Arithmetic and logic with constants, and casts of casts.
#include "ops/infer.hpp"
#include "ops/registry.hpp"
#include "passes/rules/rules.hpp"

namespace rm::passes {
namespace {

using ir::DType;
using ir::Node;
using ir::ValueId;

bool same_type(const Rewriter& rw, ValueId a, ValueId b) { return rw.type(a) == rw.type(b); }

// `v` as the whole result: itself, or broadcast to the result's shape.
bool replace_by(Rewriter& rw, const Node& node, ValueId v) {
  if (same_type(rw, node.result(), v)) return rw.replace(node.result(), v);
  if (rw.dtype(v) != rw.dtype(node.result())) return false;
  const ir::Dims& shape = rw.dims(node.result());
  return rw.replace(node.result(),
                    rw.emit("expand", {v}, {{"shape", shape}}, rw.type(node.result())));
}

// Every value of `from` has an exact counterpart in `to`.
bool widens(DType from, DType to) {
  if (from == to || from == DType::kBool) return true;
  switch (to) {
    case DType::kF64:
      return from != DType::kI64 && from != DType::kU64;
    case DType::kF32:
      return from == DType::kBF16 || from == DType::kF16 || from == DType::kI16 ||
             from == DType::kI8 || from == DType::kU8 || from == DType::kU16;
    case DType::kI64:
      return !ir::is_floating(from) && from != DType::kU64;
    case DType::kI32:
      return from == DType::kI16 || from == DType::kI8 || from == DType::kU8 || from == DType::kU16;
    case DType::kI16:
      return from == DType::kI8 || from == DType::kU8;
    default:
      return false;
  }
}

}  // namespace

// x + 0, x - 0, x * 1, x / 1, x ^ 1. (-0.0 + 0 gives -0.0 here: equal to torch's 0.0.)
bool drop_identity_arithmetic(Rewriter& rw, const Node& node) {
  bool additive = node.op == "add" || node.op == "sub";
  bool multiplicative = node.op == "mul" || node.op == "div" || node.op == "pow";
  if (!additive && !multiplicative) return false;
  bool commutes = node.op == "add" || node.op == "mul";
  for (int order : kBothOrders) {
    auto [x, constant] = ordered(node, order);
    if (order == 1 && !commutes) break;
    if (rw.dtype(x) != rw.dtype(node.result())) continue;
    if (rw.is_splat(constant, additive ? 0.0 : 1.0)) return replace_by(rw, node, x);
  }
  return false;
}

bool drop_identity_logic(Rewriter& rw, const Node& node) {
  if (node.op == "logical_not") {
    const Node* inner = rw.def(node.operands[0], "logical_not");
    if (inner == nullptr || rw.dtype(inner->operands[0]) != DType::kBool) return false;
    return rw.replace(node.result(), inner->operands[0]);
  }
  if ((node.op != "and" && node.op != "or") || rw.dtype(node.result()) != DType::kBool)
    return false;
  for (int order : kBothOrders) {
    auto [x, constant] = ordered(node, order);
    std::optional<double> value = rw.splat(constant);
    if (!value) continue;
    bool absorbing = (*value != 0) == (node.op == "or");
    return replace_by(rw, node, absorbing ? constant : x);
  }
  return false;
}

bool drop_true_check(Rewriter& rw, const Node& node) {
  if (node.op != "check") return false;
  const std::optional<double> value = rw.splat(node.operands[0]);
  return value && *value != 0 && rw.replace(node.result(), node.operands[0]);
}

bool square_is_product(Rewriter& rw, const Node& node) {
  if (node.op != "pow" || !rw.is_splat(node.operands[1], 2.0) ||
      !same_type(rw, node.operands[0], node.result())) {
    return false;
  }
  ValueId x = node.operands[0];
  return rw.replace(node.result(), rw.emit("mul", {x, x}, {}, rw.type(node.result())));
}

// Commutative nodes have their constant second, so that rules need one form.
bool constant_operand_second(Rewriter& rw, const Node& node) {
  const ops::OpDef* def = ops::find(node.op);
  if (def == nullptr || !def->is(ops::kCommutative) || node.operands.size() != 2) return false;
  if (!rw.splat(node.operands[0]) || rw.splat(node.operands[1])) return false;
  return rw.replace(node.result(), rw.emit_like(node, {node.operands[1], node.operands[0]}));
}

bool compose_casts(Rewriter& rw, const Node& node) {
  if (node.op != "cast") return false;
  const Node* inner = rw.def(node.operands[0], "cast");
  if (inner == nullptr) return false;
  ValueId x = inner->operands[0];
  // f32 -> i64 -> f32 truncates, so the first step must keep every value. To bool is a test for
  // zero: any widening before it keeps that too.
  if (!widens(rw.dtype(x), rw.dtype(node.operands[0]))) return false;
  return rw.replace(node.result(), rw.emit_like(node, {x}));
}

bool where_of_constant(Rewriter& rw, const Node& node) {
  if (node.op != "where") return false;
  std::optional<double> condition = rw.splat(node.operands[0]);
  if (!condition) return false;
  return replace_by(rw, node, node.operands[*condition != 0 ? 1 : 2]);
}

}  // namespace rm::passes
