// layer_norm_backward and rms_norm_backward: the gradients of what a norm over the last axis read.
#include <cmath>

#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

// h is what was normalised; `sum` the gradient that arrives at h from elsewhere.
enum Operand : size_t { kDy, kH, kWeight, kSum };

Types infer_norm_backward(const Graph& graph, const Node& node, bool centred) {
  const TensorType &dy = operand_type(graph, node, kDy), &h = operand_type(graph, node, kH);
  if (!ir::is_floating(h.dtype)) fail(node, "a floating operand", h.str() + "; try a cast");
  node.f("eps");
  if (h.rank() == 0) fail(node, "an operand with an axis", h.str());
  const auto alike = [&](const TensorType& t, const char* what) {
    check_dtype(node, t, h.dtype, what);
    check_rank(node, t, h.rank(), what);
    for (size_t d = 0; d < h.rank(); ++d) unify(node, t.dims[d], h.dims[d], what);
  };
  alike(dy, "the gradient of what the norm gave");
  if (present(node, kSum)) alike(operand_type(graph, node, kSum), "the gradient of what it read");
  if (present(node, kWeight)) {
    const TensorType& weight = operand_type(graph, node, kWeight);
    check_dtype(node, weight, h.dtype, "a weight");
    check_rank(node, weight, 1, "a weight");
    unify(node, weight.dims[0], h.dims.back(), "weight and operand sizes");
  }
  const TensorType column{h.dtype, {h.dims.back()}};
  Types out{h, column};
  if (centred) out.push_back(column);
  return out;
}

Types infer_layer_norm_backward(const Graph& graph, const Node& node) {
  return infer_norm_backward(graph, node, true);
}
Types infer_rms_norm_backward(const Graph& graph, const Node& node) {
  return infer_norm_backward(graph, node, false);
}

Cost norm_backward_cost(const Graph& graph, const Node& node) {
  return {16.0 * static_cast<double>(result_type(graph, node).num_elements()),
          traffic_bytes(graph, node)};
}

struct Columns {
  std::vector<double> weight, dweight, dbias;
};

// y = n (w + offset) + c with n = (h - mean) r: dx = r (g - mean g - n mean(g n)) for g = dy w.
void add_row(const double* dy, const double* h, size_t n, double eps, bool centred, double offset,
             Columns& c, double* dx) {
  const auto count = static_cast<double>(n);
  double mean = 0, square = 0, along = 0, level = 0;
  for (size_t j = 0; centred && j < n; ++j) mean += h[j] / count;
  for (size_t j = 0; j < n; ++j) square += (h[j] - mean) * (h[j] - mean);
  const double r = 1.0 / std::sqrt(square / count + eps);
  const auto g = [&](size_t j) { return dy[j] * (c.weight.empty() ? 1.0 : c.weight[j] + offset); };
  for (size_t j = 0; j < n; ++j) {
    const double normal = (h[j] - mean) * r;
    along += g(j) * normal / count;
    level += centred ? g(j) / count : 0.0;
    c.dweight[j] += dy[j] * normal;
    c.dbias[j] += dy[j];
  }
  for (size_t j = 0; j < n; ++j) dx[j] += r * (g(j) - level - (h[j] - mean) * r * along);
}

std::vector<HostTensor> reference_norm_backward(const Node& node, const HostOperands& in,
                                                const Types& out, bool centred) {
  const auto given = [&](size_t i) { return i < in.size() && in[i] != nullptr; };
  const std::vector<double> dy = to_doubles(*in[kDy]), h = to_doubles(*in[kH]);
  std::vector<double> dx(h.size(), 0);
  if (given(kSum)) dx = to_doubles(*in[kSum]);
  const auto n = static_cast<size_t>(out[0].dims.back().value());
  Columns c{{}, std::vector<double>(n), std::vector<double>(n)};
  if (given(kWeight)) c.weight = to_doubles(*in[kWeight]);
  const double offset = node.f_or("weight_offset", 0.0);
  for (size_t at = 0; n > 0 && at < h.size(); at += n) {
    add_row(dy.data() + at, h.data() + at, n, node.f("eps"), centred, offset, c, dx.data() + at);
  }
  std::vector<HostTensor> results{from_doubles(out[0], dx), from_doubles(out[1], c.dweight)};
  if (centred) results.push_back(from_doubles(out[2], c.dbias));
  return results;
}

std::vector<HostTensor> reference_layer_norm_backward(const Node& node, const HostOperands& in,
                                                      const Types& out) {
  return reference_norm_backward(node, in, out, true);
}
std::vector<HostTensor> reference_rms_norm_backward(const Node& node, const HostOperands& in,
                                                    const Types& out) {
  return reference_norm_backward(node, in, out, false);
}

}  // namespace

extern const OpDef kLayerNormBackward{"layer_norm_backward",     2, 4, kNone,
                                      infer_layer_norm_backward, norm_backward_cost,
                                      reference_layer_norm_backward};
extern const OpDef kRmsNormBackward{"rms_norm_backward",     2, 4, kNone,
                                    infer_rms_norm_backward, norm_backward_cost,
                                    reference_rms_norm_backward};

}  // namespace rm::ops
