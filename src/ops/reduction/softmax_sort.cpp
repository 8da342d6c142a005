// softmax (and its logarithm) and stable sort along one axis.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Types infer_softmax(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, 0);
  axis_of(node, x.rank());
  if (!ir::is_floating(x.dtype)) fail(node, "a floating operand", x.str() + "; try a cast");
  return {x};
}

Cost softmax_cost(const Graph& graph, const Node& node) {
  return {5.0 * static_cast<double>(operand_type(graph, node, 0).num_elements()),
          traffic_bytes(graph, node)};
}

std::vector<HostTensor> reference_softmax(const Node& node, const HostOperands& in,
                                          const Types& out) {
  AxisSplit s = split_at(out[0].dims, axis_of(node, out[0].rank()));
  bool log = node.i_or("log", 0) != 0;
  std::vector<double> x = to_doubles(*in[0]);
  for (int64_t o = 0; o < s.outer; ++o) {
    for (int64_t i = 0; i < s.inner; ++i) {
      auto at = [&](int64_t k) { return static_cast<size_t>((o * s.size + k) * s.inner + i); };
      double high = -std::numeric_limits<double>::infinity(), sum = 0;
      for (int64_t k = 0; k < s.size; ++k) high = std::max(high, x[at(k)]);
      for (int64_t k = 0; k < s.size; ++k) sum += std::exp(x[at(k)] - high);
      for (int64_t k = 0; k < s.size; ++k) {
        double shifted = x[at(k)] - high;
        x[at(k)] = log ? shifted - std::log(sum) : std::exp(shifted) / sum;
      }
    }
  }
  return {from_doubles(out[0], x)};
}

Types infer_sort(const Graph& graph, const Node& node) {
  TensorType values = operand_type(graph, node, 0);
  size_t axis = axis_of(node, values.rank());
  int64_t k = node.i_or("k", -1);
  if (k >= 0) {
    const ir::Dim& size = values.dims[axis];
    if (size.is_static() && k > size.value()) fail(node, "k <= " + size.str(), std::to_string(k));
    values.dims[axis] = k;
  }
  return {values, {ir::DType::kI64, values.dims}};
}

// NaN sorts above every number, as in torch.
bool below(double a, double b) { return std::isnan(b) ? !std::isnan(a) : a < b; }

std::vector<HostTensor> reference_sort(const Node& node, const HostOperands& in, const Types& out) {
  size_t axis = axis_of(node, out[0].rank());
  AxisSplit s = split_at(in[0]->type.dims, axis);
  int64_t k = out[0].dims[axis].value();
  bool descending = node.i_or("descending", 0) != 0;
  std::vector<double> x = to_doubles(*in[0]);
  std::vector<int64_t> order(static_cast<size_t>(s.size));
  std::vector<int64_t> from(static_cast<size_t>(out[0].num_elements())), index = from;
  for (int64_t o = 0; o < s.outer; ++o) {
    for (int64_t i = 0; i < s.inner; ++i) {
      auto at = [&](int64_t j) { return (o * s.size + j) * s.inner + i; };
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
        double va = x[static_cast<size_t>(at(a))], vb = x[static_cast<size_t>(at(b))];
        return descending ? below(vb, va) : below(va, vb);
      });
      for (int64_t j = 0; j < k; ++j) {
        auto to = static_cast<size_t>((o * k + j) * s.inner + i);
        index[to] = order[static_cast<size_t>(j)];
        from[to] = at(index[to]);
      }
    }
  }
  return {take(*in[0], out[0], from), from_ints(out[1], index)};
}

Cost sort_cost(const Graph& graph, const Node& node) {
  auto n = static_cast<double>(operand_type(graph, node, 0).num_elements());
  return {n * std::log2(n + 2), traffic_bytes(graph, node)};
}

}  // namespace

extern const OpDef kSoftmax{"softmax",        1, 1, kReduction, infer_softmax, softmax_cost,
                            reference_softmax};
extern const OpDef kSort{"sort", 1, 1, kReduction, infer_sort, sort_cost, reference_sort};

}  // namespace rm::ops
