// group_norm: each group of channels of a sample has mean 0 and variance 1, then weight and bias.
#include <cmath>

#include "ops/ewise_opcodes.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Types infer_group_norm(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, 0);
  if (x.rank() < 2 || !ir::is_floating(x.dtype)) {
    fail(node, "a floating operand of rank >= 2", x.str());
  }
  const int64_t groups = node.i("groups");
  const ir::Dim& channels = x.dims[1];
  if (groups < 1 || (channels.is_static() && channels.value() % groups != 0)) {
    fail(node, "channels that groups divide", x.str());
  }
  node.f("eps");
  for (size_t i : {size_t{1}, size_t{2}}) {
    if (!present(node, i)) continue;
    const TensorType& scale = operand_type(graph, node, i);
    check_dtype(node, scale, x.dtype, "weight and bias");
    check_rank(node, scale, 1, "weight and bias");
    unify(node, scale.dims[0], channels, "weight and channels");
  }
  const std::string activation = node.s_or("activation", "none");
  if (activation != "none" && activation != "silu") fail(node, "activation none or silu", activation);
  return {x};
}

Cost group_norm_cost(const Graph& graph, const Node& node) {
  return {8 * static_cast<double>(result_type(graph, node).num_elements()),
          traffic_bytes(graph, node)};
}

std::vector<HostTensor> reference_group_norm(const Node& node, const HostOperands& in,
                                             const Types& out) {
  std::vector<double> x = to_doubles(*in[0]);
  auto optional = [&](size_t i) {
    return i < in.size() && in[i] != nullptr ? to_doubles(*in[i]) : std::vector<double>{};
  };
  const std::vector<double> weight = optional(1), bias = optional(2);
  const auto groups = static_cast<size_t>(node.i("groups"));
  const auto batch = static_cast<size_t>(out[0].dims[0].value()),
             channels = static_cast<size_t>(out[0].dims[1].value());
  if (x.empty()) return {from_doubles(out[0], x)};
  const size_t plane = x.size() / (batch * channels), n = plane * channels / groups;
  const bool silu = node.s_or("activation", "none") == "silu";
  for (size_t g = 0; g < batch * groups; ++g) {
    double* group = x.data() + g * n;
    double mean = 0, square = 0;
    for (size_t i = 0; i < n; ++i) mean += group[i] / static_cast<double>(n);
    for (size_t i = 0; i < n; ++i) square += (group[i] - mean) * (group[i] - mean);
    const double inverse = 1 / std::sqrt(square / static_cast<double>(n) + node.f("eps"));
    for (size_t i = 0; i < n; ++i) {
      const size_t c = (g * n + i) / plane % channels;
      double y = (group[i] - mean) * inverse;
      y = y * (weight.empty() ? 1 : weight[c]) + (bias.empty() ? 0 : bias[c]);
      group[i] = silu ? apply_float(find_opcode("silu")->opcode, y, 0, 0) : y;
    }
  }
  return {from_doubles(out[0], x)};
}

}  // namespace

extern const OpDef kGroupNorm{"group_norm",         1,
                              3,                    kReduction,
                              infer_group_norm,     group_norm_cost,
                              reference_group_norm};

}  // namespace rm::ops
