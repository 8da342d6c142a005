// Convolutions and what follows them: batch norm folded into weight and bias, then
// act(conv(x, w) + bias + residual).
#include <algorithm>

#include "passes/rules/rules.hpp"

namespace rm::passes {
namespace {

using ir::Dim;
using ir::Dims;
using ir::Node;
using ir::ValueId;

constexpr size_t kBias = 2, kResidual = 3;
// What kernels apply in place; others stay nodes of their own.
constexpr std::string_view kActivations[] = {"relu", "gelu", "gelu_tanh", "silu", "tanh"};

// The convolution that defines `v`, when nothing else reads it and nothing follows it yet.
const Node* open_conv(const Rewriter& rw, ValueId v) {
  const Node* conv = rw.def(v, "conv");
  const bool open = conv != nullptr && rw.single_use(v) && conv->s_or("activation", "none") == "none";
  return open ? conv : nullptr;
}

std::vector<ValueId> padded_operands(const Node& conv) {
  std::vector<ValueId> operands = conv.operands;
  operands.resize(4, ir::kNoValue);
  return operands;
}

// One number a channel, the same for every sample and place: [C,1,1], [1,C,1,1] or one number.
// Never a value of the batch.
bool is_channelwise(const Rewriter& rw, ValueId v, const Dims& image) {
  if (!rw.is_constant_expression(v)) return false;
  const Dims& dims = rw.dims(v);
  if (dims.size() > image.size()) return false;
  for (size_t i = 0; i < dims.size(); ++i) {
    const size_t axis = image.size() - dims.size() + i;
    if (dims[i] == Dim(1) || (axis == 1 && dims[i] == image[1])) continue;
    return false;
  }
  return true;
}

// [C], also of one number.
ValueId by_channel(Rewriter& rw, ValueId v, const Dim& channels) {
  const ir::TensorType type{rw.dtype(v), {channels}};
  const Dims& dims = rw.dims(v);
  const bool one = std::all_of(dims.begin(), dims.end(), [](const Dim& d) { return d == Dim(1); });
  if (!one) return rw.reshape(v, {channels});
  return rw.emit("expand", {rw.reshape(v, {Dim(1)})}, {{"shape", Dims{channels}}}, type);
}

}  // namespace

// conv(x, w, b) * s -> conv(x, w * s, b * s)
bool conv_takes_scale(Rewriter& rw, const Node& node) {
  if (node.op != "mul") return false;
  for (int order : kBothOrders) {
    auto [y, scale] = ordered(node, order);
    const Node* conv = open_conv(rw, y);
    if (conv == nullptr || operand(*conv, kResidual) != ir::kNoValue) continue;
    const ValueId w = conv->operands[1];
    if (!rw.is_constant_expression(w) || !rw.is_constant_expression(operand(*conv, kBias)) ||
        !is_channelwise(rw, scale, rw.dims(y)) || rw.type(node.result()) != rw.type(y)) {
      continue;
    }
    const bool turned = conv->i_or("transposed", 0) != 0;
    if (turned && conv->i_or("groups", 1) != 1) continue;  // channels lie in two axes
    const Dim channels = rw.dims(y)[1];
    const ValueId factors = by_channel(rw, scale, channels);
    Dims shape(rw.dims(w).size(), Dim(1));
    shape[turned ? 1 : 0] = channels;
    std::vector<ValueId> operands = padded_operands(*conv);
    operands[1] = rw.emit("mul", {w, rw.reshape(factors, shape)}, {}, rw.type(w));
    if (operands[kBias] != ir::kNoValue) {
      operands[kBias] = rw.emit("mul", {operands[kBias], factors}, {}, rw.type(operands[kBias]));
    }
    return rw.replace(node.result(), rw.emit_like(*conv, std::move(operands)));
  }
  return false;
}

// conv(x, w, b) + s -> conv(x, w, b + s)
bool conv_takes_bias(Rewriter& rw, const Node& node) {
  if (node.op != "add") return false;
  for (int order : kBothOrders) {
    auto [y, shift] = ordered(node, order);
    const Node* conv = open_conv(rw, y);
    if (conv == nullptr || operand(*conv, kResidual) != ir::kNoValue ||
        !is_channelwise(rw, shift, rw.dims(y)) || rw.type(node.result()) != rw.type(y)) {
      continue;
    }
    std::vector<ValueId> operands = padded_operands(*conv);
    ValueId& bias = operands[kBias];
    const ValueId more = by_channel(rw, shift, rw.dims(y)[1]);
    bias = bias == ir::kNoValue ? more : rw.emit("add", {bias, more}, {}, rw.type(bias));
    return rw.replace(node.result(), rw.emit_like(*conv, std::move(operands)));
  }
  return false;
}

bool conv_takes_residual(Rewriter& rw, const Node& node) {
  if (node.op != "add") return false;
  for (int order : kBothOrders) {
    auto [y, residual] = ordered(node, order);
    const Node* conv = open_conv(rw, y);
    if (conv == nullptr || operand(*conv, kResidual) != ir::kNoValue || residual == y) continue;
    if (rw.type(residual) != rw.type(y) || rw.type(node.result()) != rw.type(y)) continue;
    std::vector<ValueId> operands = padded_operands(*conv);
    operands[kResidual] = residual;
    return rw.replace(node.result(), rw.emit_like(*conv, std::move(operands)));
  }
  return false;
}

bool conv_takes_activation(Rewriter& rw, const Node& node) {
  const bool known = std::find(std::begin(kActivations), std::end(kActivations), node.op) !=
                     std::end(kActivations);
  const Node* conv = known ? open_conv(rw, node.operands[0]) : nullptr;
  if (conv == nullptr) return false;
  Node fused = *conv;
  fused.attrs["activation"] = node.op;
  return rw.replace(node.result(), rw.emit_like(fused, fused.operands));
}

// y * clamp(y + 3, 0, 6) / 6
bool conv_takes_hardswish(Rewriter& rw, const Node& node) {
  if (node.op != "mul" || !rw.is_splat(node.operands[1], 1.0 / 6.0)) return false;
  const Node* product = rw.def(node.operands[0], "mul");
  if (product == nullptr) return false;
  for (int order : kBothOrders) {
    auto [y, gate] = ordered(*product, order);
    const Node* conv = rw.def(y, "conv");
    if (conv == nullptr || rw.uses(y) != 2 || conv->s_or("activation", "none") != "none") continue;
    const Node* low = rw.def(gate, "minimum");
    if (low == nullptr || !rw.is_splat(low->operands[1], 6)) continue;
    const Node* high = rw.def(low->operands[0], "maximum");
    if (high == nullptr || !rw.is_splat(high->operands[1], 0)) continue;
    const Node* sum = rw.def(high->operands[0], "add");
    if (sum == nullptr || sum->operands[0] != y || !rw.is_splat(sum->operands[1], 3)) continue;
    Node fused = *conv;
    fused.attrs["activation"] = std::string("hardswish");
    return rw.replace(node.result(), rw.emit_like(fused, fused.operands));
  }
  return false;
}

bool group_norm_takes_silu(Rewriter& rw, const Node& node) {
  if (node.op != "silu") return false;
  const Node* norm = rw.def(node.operands[0], "group_norm");
  if (norm == nullptr || !rw.single_use(node.operands[0]) ||
      norm->s_or("activation", "none") != "none") {
    return false;
  }
  Node fused = *norm;
  fused.attrs["activation"] = node.op;
  return rw.replace(node.result(), rw.emit_like(fused, fused.operands));
}

}  // namespace rm::passes
