// One walk from the loss backwards over the nodes that lie between it and what is differentiated.
#include "autograd/differentiate.hpp"

#include <algorithm>
#include <string>

#include "autograd/rules.hpp"
#include "base/error.hpp"
#include "ops/registry.hpp"

namespace rm::autograd {
namespace {

// Which values depend on one of `wrt` through floating values.
std::vector<char> depending(const ir::Graph& graph, const std::vector<ValueId>& wrt) {
  std::vector<char> depends(graph.num_values(), 0);
  for (ValueId v : wrt) depends[static_cast<size_t>(v)] = 1;
  for (const ir::Node& node : graph.nodes) {
    bool any = false;
    for (ValueId v : node.operands) {
      any = any || (v != ir::kNoValue && depends[static_cast<size_t>(v)] != 0);
    }
    const NamedRule* row = find_rule(node.op);
    if (!any || (row != nullptr && row->flat())) continue;
    for (ValueId v : node.results) {
      depends[static_cast<size_t>(v)] = ir::is_floating(graph.type(v).dtype) ? 1 : 0;
    }
  }
  return depends;
}

bool is_half(const ir::Graph& graph, ValueId v) {
  if (v == ir::kNoValue) return false;
  const ir::DType dtype = graph.type(v).dtype;
  return dtype == ir::DType::kBF16 || dtype == ir::DType::kF16;
}

// Gradients of half types are computed in f32 and rounded once, as torch's kernels do: a rule of
// several nodes would round after each. Products, convolutions and attention's own gradient accumulate
// in f32 by themselves, views round nothing; they keep their type, and with it the faster kernels.
bool keeps_half(const Builder& b, const ir::Node& node, const std::vector<char>& wanted) {
  const std::string& op = node.op;
  const ops::OpDef* def = ops::find(op);
  if (op == "sdpa") return is_attention_whole(b, node, wanted);
  // Their gradient is dy itself, or its sum over what was repeated, which rounds once.
  if (op == "cross_entropy") return true;  // whose logits alone may be half
  if (op == "add" || op == "sub" || op == "neg") return true;
  return op == "matmul" || op == "linear" || op == "conv" || op == "cast" || op == "concat" ||
         (def != nullptr && def->is(ops::kView));
}

ValueId widened(Builder& b, ValueId v) {
  if (!is_half(b.graph(), v)) return v;
  const ir::Graph& graph = b.graph();
  const bool scalar = graph.value(v).kind == ir::ValueKind::kLiteral && graph.type(v).rank() == 0;
  return scalar ? b.scalar(ir::DType::kF32, ir::literal_element(graph, v))
                : b.cast(v, ir::DType::kF32);
}

// Gives `din` of a copy of the node whose half values are f32.
void apply_widened(Builder& b, const NamedRule& row, ir::Node node, std::vector<ValueId> dout,
                   const std::vector<char>& wanted, std::vector<ValueId>& din) {
  const std::vector<ValueId> operands = node.operands;
  for (auto* values : {&node.operands, &node.results, &dout}) {
    for (ValueId& v : *values) v = widened(b, v);
  }
  Adjoint adjoint{b, node, dout, wanted, din};
  row.rule(adjoint);
  for (size_t i = 0; i < din.size(); ++i) {
    if (din[i] != ir::kNoValue) din[i] = b.cast(din[i], b.dtype(operands[i]));
  }
}

void check_loss(const ir::Graph& graph, ValueId loss) {
  const ir::TensorType& type = graph.type(loss);
  if (!ir::is_floating(type.dtype) || !type.is_static() || type.num_elements() != 1) {
    throw Error(RM_INVALID_ARGUMENT,
                "[autograd] expected a loss of one floating element, got " + type.str(), "RM704");
  }
}

}  // namespace

std::vector<ValueId> differentiate(ir::Graph& graph, ValueId loss,
                                   const std::vector<ValueId>& wrt, const Served& served) {
  check_loss(graph, loss);
  const std::vector<char> depends = depending(graph, wrt);
  auto needs = [&](ValueId v) {
    return v != ir::kNoValue && depends[static_cast<size_t>(v)] != 0;
  };
  Builder b(graph, served);
  std::vector<ValueId> gradient(depends.size(), ir::kNoValue);
  if (needs(loss)) gradient[static_cast<size_t>(loss)] = b.full(graph.type(loss), 1);

  const std::vector<ir::Node> forward(graph.nodes.begin(),
                                      graph.nodes.end() - (needs(loss) ? 1 : 0));
  for (size_t n = forward.size(); n-- > 0;) {
    const ir::Node& node = forward[n];
    std::vector<ValueId> dout;
    bool reached = false;
    for (ValueId v : node.results) {
      dout.push_back(needs(v) ? gradient[static_cast<size_t>(v)] : ir::kNoValue);
      reached = reached || dout.back() != ir::kNoValue;
    }
    if (!reached) continue;
    const NamedRule* row = find_rule(node.op);
    if (row == nullptr || row->rule == nullptr) {
      throw Error(RM_UNIMPLEMENTED,
                  "[autograd] expected an operator with a gradient, got '" + node.op + "'" +
                      (row == nullptr ? "" : ": " + std::string(row->why)),
                  "RM702");
    }
    std::vector<char> wanted;
    for (ValueId v : node.operands) wanted.push_back(needs(v) ? 1 : 0);
    std::vector<ValueId> din(node.operands.size(), ir::kNoValue);
    auto half = [&](ValueId v) { return is_half(graph, v); };
    if (!keeps_half(b, node, wanted) && (std::any_of(node.operands.begin(), node.operands.end(), half) ||
                                 std::any_of(node.results.begin(), node.results.end(), half))) {
      apply_widened(b, *row, node, dout, wanted, din);
    } else {
      Adjoint adjoint{b, node, dout, wanted, din};
      row->rule(adjoint);
    }
    for (size_t i = 0; i < din.size(); ++i) {
      if (din[i] == ir::kNoValue || wanted[i] == 0) continue;
      ValueId& sum = gradient[static_cast<size_t>(node.operands[i])];
      sum = sum == ir::kNoValue ? din[i] : b.add(sum, din[i]);
    }
  }
  std::vector<ValueId> out;
  out.reserve(wrt.size());
  for (ValueId v : wrt) out.push_back(gradient[static_cast<size_t>(v)]);
  return out;
}

}  // namespace rm::autograd
