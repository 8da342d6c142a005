// RMS normalisation written out -> rms_norm, then its weight, its casts and its residual.
// Computing in f32 inside the fused node keeps what the casts of half-precision models are for.
#include <algorithm>

#include "passes/rules/rules.hpp"

namespace rm::passes {
namespace {

using ir::DType;
using ir::Node;
using ir::ValueId;

// mean(x * x) over the last axis, kept as size 1; returns x.
ValueId mean_of_squares(const Rewriter& rw, ValueId v) {
  const Node* mean = rw.def(v, "reduce");
  if (mean == nullptr || mean->s("kind") != "mean" || mean->i_or("keepdim", 0) == 0)
    return ir::kNoValue;
  auto last = static_cast<int64_t>(rw.type(v).rank()) - 1;
  if (mean->ints("axes") != std::vector<int64_t>{last}) return ir::kNoValue;
  const Node* square = rw.def(mean->operands[0], "mul");
  if (square != nullptr && square->operands[0] == square->operands[1]) return square->operands[0];
  const Node* power = rw.def(mean->operands[0], "pow");
  if (power != nullptr && rw.is_splat(power->operands[1], 2.0)) return power->operands[0];
  return ir::kNoValue;
}

// 1 / sqrt(mean(x * x) + eps); returns x and eps.
ValueId inverse_rms(const Rewriter& rw, ValueId v, double* eps) {
  ValueId inside = ir::kNoValue;
  if (const Node* rsqrt = rw.def(v, "rsqrt")) inside = rsqrt->operands[0];
  if (const Node* reciprocal = rw.def(v, "reciprocal")) {
    if (const Node* sqrt = rw.def(reciprocal->operands[0], "sqrt")) inside = sqrt->operands[0];
  }
  const Node* add = rw.def(inside, "add");
  if (add == nullptr) return ir::kNoValue;
  for (int order : kBothOrders) {
    auto [mean, constant] = ordered(*add, order);
    std::optional<double> value = rw.splat(constant);
    if (!value) continue;
    *eps = *value;
    return mean_of_squares(rw, mean);
  }
  return ir::kNoValue;
}

// Whether `widened` is a cast of `x` to f32 that an operator computing in f32 does by itself.
bool is_widening_of(const Rewriter& rw, ValueId widened, ValueId x) {
  const Node* cast = rw.def(widened, "cast");
  return widened == x ||
         (cast != nullptr && cast->operands[0] == x && rw.dtype(widened) == DType::kF32 &&
          (rw.dtype(x) == DType::kBF16 || rw.dtype(x) == DType::kF16));
}

}  // namespace

bool rms_norm_of_parts(Rewriter& rw, const Node& node) {
  if (node.op != "mul") return false;
  for (int order : kBothOrders) {
    auto [x, scale] = ordered(node, order);
    double eps = 0;
    ValueId normalised = inverse_rms(rw, scale, &eps);
    // T5 takes the mean of a widened copy and scales the original.
    if (normalised == ir::kNoValue || !is_widening_of(rw, normalised, x)) continue;
    if (rw.type(node.result()) != rw.type(x)) continue;
    return rw.replace(node.result(), rw.emit("rms_norm", {x, ir::kNoValue}, {{"eps", eps}},
                                             rw.type(node.result())));
  }
  return false;
}

bool rms_norm_takes_weight(Rewriter& rw, const Node& node) {
  if (node.op != "mul") return false;
  for (int order : kBothOrders) {
    auto [y, weight] = ordered(node, order);
    const Node* norm = rw.def(y, "rms_norm");
    if (norm == nullptr || operand(*norm, 1) != ir::kNoValue || norm->results.size() != 1) continue;
    if (rw.type(weight).rank() != 1 || rw.dims(weight)[0] != rw.dims(y).back() ||
        rw.type(node.result()) != rw.type(y)) {
      continue;
    }
    return rw.replace(node.result(), rw.emit("rms_norm", {norm->operands[0], weight}, norm->attrs,
                                             rw.type(node.result())));
  }
  return false;
}

// cast(rms_norm(cast(x: bf16 -> f32)): f32 -> bf16) -> rms_norm(x).
bool rms_norm_takes_casts(Rewriter& rw, const Node& node) {
  if (node.op != "cast") return false;
  const Node* norm = rw.def(node.operands[0], "rms_norm");
  if (norm == nullptr || norm->results.size() != 1) return false;
  const Node* widen = rw.def(norm->operands[0], "cast");
  if (widen == nullptr || !is_widening_of(rw, norm->operands[0], widen->operands[0]) ||
      rw.dtype(widen->operands[0]) != rw.dtype(node.result())) {
    return false;
  }
  ValueId weight = operand(*norm, 1);
  if (weight != ir::kNoValue) {
    const Node* widened = rw.def(weight, "cast");
    if (widened == nullptr || rw.dtype(widened->operands[0]) != rw.dtype(node.result()) ||
        !is_widening_of(rw, weight, widened->operands[0])) {
      return false;
    }
    weight = widened->operands[0];
  }
  return rw.replace(node.result(), rw.emit("rms_norm", {widen->operands[0], weight}, norm->attrs,
                                           rw.type(node.result())));
}

// rms_norm(x, 1 + w) -> rms_norm(x, w) with weight_offset 1; the sum may be of a widened weight.
bool rms_norm_takes_weight_offset(Rewriter& rw, const Node& node) {
  if (node.op != "rms_norm" || node.f_or("weight_offset", 0.0) != 0.0) return false;
  const Node* sum = rw.def(operand(node, 1), "add");
  if (sum == nullptr) return false;
  for (int order : kBothOrders) {
    auto [weight, constant] = ordered(*sum, order);
    if (!rw.is_splat(constant, 1.0) || rw.type(weight) != rw.type(node.operands[1])) continue;
    Node offset = node;
    offset.attrs["weight_offset"] = 1.0;
    offset.operands[1] = weight;
    return rw.replace(node.result(), rw.emit_like(offset, offset.operands));
  }
  return false;
}

// norm(a + b) -> norm(a, residual b); the sum becomes the second result when others read it.
bool norm_takes_residual(Rewriter& rw, const Node& node) {
  bool layer = node.op == "layer_norm";
  size_t slot = layer ? 3 : 2;
  if ((!layer && node.op != "rms_norm") || operand(node, slot) != ir::kNoValue ||
      node.results.size() != 1 || node.i_or("num_axes", 1) != 1) {
    return false;
  }
  ValueId sum = node.operands[0];
  const Node* add = rw.def(sum, "add");
  if (add == nullptr || rw.type(add->operands[0]) != rw.type(sum) ||
      rw.type(add->operands[1]) != rw.type(sum)) {
    return false;
  }
  bool shared = !rw.single_use(sum);
  if (shared && rw.used_above(sum)) return false;
  std::vector<ValueId> operands = node.operands;
  operands.resize(slot + 1, ir::kNoValue);
  operands[0] = add->operands[0];
  operands[slot] = add->operands[1];
  std::vector<ir::TensorType> types(shared ? 2 : 1, rw.type(sum));
  std::vector<ValueId> results = rw.emit(node.op, std::move(operands), node.attrs, types);
  if (shared) rw.move_other_uses(sum, results[1]);
  return rw.replace(node.result(), results[0]);
}

// dx + g -> the backward of a norm that adds g to its dx: g is what arrives at the sum that the norm
// read. Its other results move along, so nobody may have read them yet.
bool norm_backward_takes_sum(Rewriter& rw, const Node& node) {
  if (node.op != "add") return false;
  for (int order : kBothOrders) {
    auto [dx, other] = ordered(node, order);
    const Node* norm = rw.def(dx);
    if (norm == nullptr || (norm->op != "layer_norm_backward" && norm->op != "rms_norm_backward") ||
        norm->result() != dx || operand(*norm, 3) != ir::kNoValue || !rw.single_use(dx) ||
        rw.type(other) != rw.type(dx)) {
      continue;
    }
    const std::vector<ValueId> results = norm->results;
    if (std::any_of(results.begin() + 1, results.end(),
                    [&](ValueId v) { return rw.used_above(v); })) {
      continue;
    }
    std::vector<ValueId> operands = norm->operands;
    operands.resize(4, ir::kNoValue);
    operands[3] = other;
    const std::vector<ValueId> made = rw.def(rw.emit_like(*norm, std::move(operands)))->results;
    for (size_t i = 1; i < made.size(); ++i) rw.replace(results[i], made[i]);
    return rw.replace(node.result(), made[0]);
  }
  return false;
}

}  // namespace rm::passes
