// Matrix products and what follows them -> gemm with its epilogue:
// act(alpha * x w + bias) + residual.
#include <algorithm>

#include "passes/rules/rules.hpp"

namespace rm::passes {
namespace {

using ir::Dim;
using ir::Dims;
using ir::Node;
using ir::ValueId;

constexpr std::string_view kActivations[] = {"relu", "gelu", "gelu_tanh",
                                             "silu", "tanh", "sigmoid"};

bool has_activation(const Node& gemm) { return gemm.s_or("activation", "none") != "none"; }

// The gemm that defines `v`, when nothing else reads it.
const Node* own_gemm(const Rewriter& rw, ValueId v) {
  const Node* gemm = rw.def(v, "gemm");
  return gemm != nullptr && rw.single_use(v) ? gemm : nullptr;
}

std::vector<ValueId> padded_operands(const Node& gemm) {
  std::vector<ValueId> operands = gemm.operands;
  operands.resize(4, ir::kNoValue);
  return operands;
}

bool is_row(const Dims& dims, const Dim& n) {
  return !dims.empty() && dims.back() == n &&
         std::all_of(dims.begin(), dims.end() - 1, [](const Dim& d) { return d == Dim(1); });
}

}  // namespace

bool linear_is_gemm(Rewriter& rw, const Node& node) {
  if (node.op != "linear" || rw.type(node.operands[0]).rank() < 2) return false;
  std::vector<ValueId> operands = padded_operands(node);
  return rw.replace(node.result(),
                    rw.emit("gemm", std::move(operands),
                            {{"activation", std::string("none")}, {"trans_b", int64_t{1}}},
                            rw.type(node.result())));
}

// [.., M, 1] x [.., 1, N]: a sum of one product, which an element-wise node takes along. Rotary
// frequencies are made so.
bool matmul_of_one_term_is_mul(Rewriter& rw, const Node& node) {
  if (node.op != "matmul" || !ir::is_floating(rw.dtype(node.result()))) return false;
  const ValueId a = node.operands[0], b = node.operands[1];
  if (rw.dims(a).size() < 2 || rw.dims(b).size() < 2 || rw.dims(a).back() != Dim(1)) return false;
  return rw.replace(node.result(), rw.emit("mul", {a, b}, {}, rw.type(node.result())));
}

bool matmul_is_gemm(Rewriter& rw, const Node& node) {
  if (node.op != "matmul" || rw.type(node.operands[1]).rank() != 2) return false;
  ValueId w = node.operands[1];
  int64_t trans_b = 0;
  if (const Node* transposed = rw.def(w, "permute")) {
    w = transposed->operands[0];
    trans_b = 1;
  }
  return rw.replace(
      node.result(),
      rw.emit("gemm", {node.operands[0], w, ir::kNoValue, ir::kNoValue},
              {{"activation", std::string("none")}, {"trans_b", trans_b}}, rw.type(node.result())));
}

bool gemm_takes_bias(Rewriter& rw, const Node& node) {
  if (node.op != "add") return false;
  for (int order : kBothOrders) {
    auto [y, bias] = ordered(node, order);
    const Node* gemm = own_gemm(rw, y);
    if (gemm == nullptr || has_activation(*gemm) || operand(*gemm, 2) != ir::kNoValue ||
        operand(*gemm, 3) != ir::kNoValue) {
      continue;
    }
    const Dim& n = rw.dims(y).back();
    if (!is_row(rw.dims(bias), n) || rw.type(node.result()) != rw.type(y)) continue;
    // A one-row result plus a one-row tensor may also be a residual: prefer constants as bias.
    if (rw.type(bias).rank() > 1 && !rw.is_constant_expression(bias)) continue;
    std::vector<ValueId> operands = padded_operands(*gemm);
    operands[2] = rw.reshape(bias, {n});
    return rw.replace(node.result(), rw.emit_like(*gemm, std::move(operands)));
  }
  return false;
}

bool gemm_takes_activation(Rewriter& rw, const Node& node) {
  if (std::find(std::begin(kActivations), std::end(kActivations), node.op) ==
      std::end(kActivations)) {
    return false;
  }
  const Node* gemm = own_gemm(rw, node.operands[0]);
  if (gemm == nullptr || has_activation(*gemm) || operand(*gemm, 3) != ir::kNoValue) return false;
  Node fused = *gemm;
  fused.attrs["activation"] = node.op;
  return rw.replace(node.result(), rw.emit_like(fused, fused.operands));
}

bool gemm_takes_residual(Rewriter& rw, const Node& node) {
  if (node.op != "add") return false;
  for (int order : kBothOrders) {
    auto [y, residual] = ordered(node, order);
    const Node* gemm = own_gemm(rw, y);
    if (gemm == nullptr || operand(*gemm, 3) != ir::kNoValue || residual == y) continue;
    if (rw.type(residual) != rw.type(y) || rw.type(node.result()) != rw.type(y)) continue;
    std::vector<ValueId> operands = padded_operands(*gemm);
    operands[3] = residual;
    return rw.replace(node.result(), rw.emit_like(*gemm, std::move(operands)));
  }
  return false;
}

// reshape(gemm(x) : [M,N]) : [*,N] -> gemm(reshape(x) : [*,K]), so that what follows sees the
// gemm. x is itself a reshape: two of them become one.
bool gemm_between_reshapes(Rewriter& rw, const Node& node) {
  if (node.op != "reshape") return false;
  const Node* gemm = own_gemm(rw, node.operands[0]);
  if (gemm == nullptr || operand(*gemm, 3) != ir::kNoValue ||
      rw.type(gemm->operands[1]).rank() != 2) {
    return false;
  }
  const Node* flatten = rw.def(gemm->operands[0], "reshape");
  const Dims& out = rw.dims(node.result());
  if (flatten == nullptr || out.size() < 2 || out.back() != rw.dims(gemm->result()).back())
    return false;
  Dims shape(out.begin(), out.end() - 1);
  shape.push_back(rw.dims(gemm->operands[0]).back());
  std::vector<ValueId> operands = padded_operands(*gemm);
  operands[0] = rw.reshape(flatten->operands[0], std::move(shape));
  return rw.replace(node.result(),
                    rw.emit("gemm", std::move(operands), gemm->attrs, rw.type(node.result())));
}

}  // namespace rm::passes
