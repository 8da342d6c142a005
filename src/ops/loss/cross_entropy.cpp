// cross_entropy and its gradient: one loss and one log-sum-exp a row, from logits of any float type.
#include <cmath>
#include <limits>

#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

enum Operand : size_t { kLogits, kTarget, kLse, kDloss };

TensorType row_type(const Graph& graph, const Node& node) {
  const TensorType &x = operand_type(graph, node, kLogits), &target = operand_type(graph, node, kTarget);
  if (!ir::is_floating(x.dtype)) fail(node, "floating logits", x.str());
  check_rank(node, x, 2, "logits");
  check_dtype(node, target, ir::DType::kI64, "targets");
  check_rank(node, target, 1, "targets");
  const ir::Dim rows = unify(node, x.dims[0], target.dims[0], "rows of logits and targets");
  return {x.dtype == ir::DType::kF64 ? x.dtype : ir::DType::kF32, {rows}};
}

Types infer_cross_entropy(const Graph& graph, const Node& node) {
  const TensorType row = row_type(graph, node);
  return {row, row};
}

Types infer_cross_entropy_backward(const Graph& graph, const Node& node) {
  const TensorType row = row_type(graph, node);
  for (size_t i : {kLse, kDloss}) {
    const TensorType& t = operand_type(graph, node, i);
    check_dtype(node, t, row.dtype, "what belongs to a row");
    check_rank(node, t, 1, "what belongs to a row");
    unify(node, t.dims[0], row.dims[0], "rows of logits and what belongs to them");
  }
  return {operand_type(graph, node, kLogits)};
}

Cost cross_entropy_cost(const Graph& graph, const Node& node) {
  return {4.0 * static_cast<double>(operand_type(graph, node, kLogits).num_elements()),
          traffic_bytes(graph, node)};
}

std::vector<HostTensor> reference_cross_entropy(const Node&, const HostOperands& in,
                                                const Types& out) {
  const std::vector<double> x = to_doubles(*in[kLogits]);
  const std::vector<int64_t> target = to_ints(*in[kTarget]);
  const auto n = static_cast<size_t>(in[kLogits]->type.dims[1].value());
  std::vector<double> loss, lse;
  for (size_t r = 0; r < target.size(); ++r) {
    const double* row = x.data() + r * n;
    double high = -std::numeric_limits<double>::infinity(), sum = 0;
    for (size_t j = 0; j < n; ++j) high = std::isnan(row[j]) ? row[j] : std::max(high, row[j]);
    for (size_t j = 0; j < n; ++j) sum += std::exp(row[j] - high);
    lse.push_back(high + std::log(sum));
    const bool inside = target[r] >= 0 && static_cast<size_t>(target[r]) < n;
    loss.push_back(inside ? lse.back() - row[target[r]] : std::nan(""));
  }
  return {from_doubles(out[0], loss), from_doubles(out[1], lse)};
}

std::vector<HostTensor> reference_cross_entropy_backward(const Node&, const HostOperands& in,
                                                         const Types& out) {
  std::vector<double> x = to_doubles(*in[kLogits]);
  const std::vector<double> lse = to_doubles(*in[kLse]), dloss = to_doubles(*in[kDloss]);
  const std::vector<int64_t> target = to_ints(*in[kTarget]);
  const auto n = static_cast<size_t>(in[kLogits]->type.dims[1].value());
  for (size_t r = 0; r < target.size(); ++r) {
    const bool inside = target[r] >= 0 && static_cast<size_t>(target[r]) < n;
    for (size_t j = 0; j < n; ++j) {
      const double chosen = static_cast<int64_t>(j) == target[r] ? 1.0 : 0.0;
      x[r * n + j] = inside ? (std::exp(x[r * n + j] - lse[r]) - chosen) * dloss[r] : std::nan("");
    }
  }
  return {from_doubles(out[0], x)};
}

}  // namespace

extern const OpDef kCrossEntropy{"cross_entropy",    2, 2, kNone, infer_cross_entropy,
                                 cross_entropy_cost, reference_cross_entropy};
extern const OpDef kCrossEntropyBackward{"cross_entropy_backward",
                                         4,
                                         4,
                                         kNone,
                                         infer_cross_entropy_backward,
                                         cross_entropy_cost,
                                         reference_cross_entropy_backward};

}  // namespace rm::ops
