// layer_norm and rms_norm, with the residual forms that fusion makes: h = x + residual is
// normalised, and is the second result when there is one.
#include <cmath>

#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Dims;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

size_t norm_axes(const Node& node, size_t rank) {
  int64_t n = node.i_or("num_axes", 1);
  if (n < 1 || n > static_cast<int64_t>(rank)) {
    fail(node, "1 <= num_axes <= " + std::to_string(rank), std::to_string(n));
  }
  return static_cast<size_t>(n);
}

// Operands 1 .. scales are weight (and bias) over the trailing axes, the next one is the residual.
Types infer_norm(const Graph& graph, const Node& node, size_t scales) {
  const TensorType& x = operand_type(graph, node, 0);
  if (!ir::is_floating(x.dtype)) fail(node, "a floating operand", x.str() + "; try a cast");
  node.f("eps");
  size_t axes = norm_axes(node, x.rank());
  for (size_t i = 1; i <= scales; ++i) {
    if (!present(node, i)) continue;
    const TensorType& scale = operand_type(graph, node, i);
    check_dtype(node, scale, x.dtype, "weight and bias");
    check_rank(node, scale, axes, "weight and bias");
    for (size_t d = 0; d < axes; ++d) {
      unify(node, scale.dims[d], x.dims[x.rank() - axes + d], "weight and operand sizes");
    }
  }
  if (present(node, scales + 1)) {
    const TensorType& residual = operand_type(graph, node, scales + 1);
    check_dtype(node, residual, x.dtype, "a residual");
    check_rank(node, residual, x.rank(), "a residual");
    for (size_t d = 0; d < x.rank(); ++d) {
      unify(node, residual.dims[d], x.dims[d], "the residual and the operand");
    }
  }
  Types out{x};
  if (node.results.size() == 2) out.push_back(x);
  return out;
}

Types infer_layer_norm(const Graph& graph, const Node& node) { return infer_norm(graph, node, 2); }
Types infer_rms_norm(const Graph& graph, const Node& node) { return infer_norm(graph, node, 1); }

Cost norm_cost(const Graph& graph, const Node& node) {
  return {8.0 * static_cast<double>(result_type(graph, node).num_elements()),
          traffic_bytes(graph, node)};
}

struct Scales {
  std::vector<double> weight, bias;
  double offset = 0;
};

void normalise_row(double* row, size_t n, double eps, bool centre, const Scales& scales) {
  double mean = 0, square = 0;
  for (size_t j = 0; j < n; ++j) mean += row[j];
  mean = centre ? mean / static_cast<double>(n) : 0.0;
  for (size_t j = 0; j < n; ++j) square += (row[j] - mean) * (row[j] - mean);
  double inverse = 1.0 / std::sqrt(square / static_cast<double>(n) + eps);
  for (size_t j = 0; j < n; ++j) {
    double weight = scales.weight.empty() ? 1.0 : scales.weight[j] + scales.offset;
    row[j] = (row[j] - mean) * inverse * weight + (scales.bias.empty() ? 0.0 : scales.bias[j]);
  }
}

std::vector<HostTensor> reference_norm(const Node& node, const HostOperands& in, const Types& out,
                                       size_t num_scales, bool centre) {
  auto values = [&](size_t i) {
    return i < in.size() && in[i] != nullptr ? to_doubles(*in[i]) : std::vector<double>{};
  };
  std::vector<double> h = values(0), residual = values(num_scales + 1);
  for (size_t i = 0; i < residual.size(); ++i) h[i] += residual[i];
  Scales scales{values(1), centre ? values(2) : std::vector<double>{},
                node.f_or("weight_offset", 0.0)};
  size_t n = 1;
  for (size_t a = 0; a < norm_axes(node, out[0].rank()); ++a) {
    n *= static_cast<size_t>(out[0].dims[out[0].rank() - 1 - a].value());
  }
  std::vector<double> y = h;
  for (size_t row = 0; n != 0 && row < y.size() / n; ++row) {
    normalise_row(y.data() + row * n, n, node.f("eps"), centre, scales);
  }
  std::vector<HostTensor> results{from_doubles(out[0], y)};
  if (out.size() == 2) results.push_back(from_doubles(out[1], h));
  return results;
}

std::vector<HostTensor> reference_layer_norm(const Node& node, const HostOperands& in,
                                             const Types& out) {
  return reference_norm(node, in, out, 2, true);
}
std::vector<HostTensor> reference_rms_norm(const Node& node, const HostOperands& in,
                                           const Types& out) {
  return reference_norm(node, in, out, 1, false);
}

}  // namespace

extern const OpDef kLayerNorm{"layer_norm",        1, 4, kReduction, infer_layer_norm, norm_cost,
                              reference_layer_norm};
extern const OpDef kRmsNorm{"rms_norm",        1, 3, kReduction, infer_rms_norm, norm_cost,
                            reference_rms_norm};

}  // namespace rm::ops
