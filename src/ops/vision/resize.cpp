// resize: interpolation along the spatial axes, as torch's upsample operators compute it.
#include <algorithm>
#include <cmath>

#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Dims;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Types infer_resize(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, 0);
  const Dims& size = node.dims("size");
  const auto& ratio = node.floats("ratio");
  const std::string& mode = node.s("mode");
  if (size.empty() || size.size() > 3 || x.rank() != size.size() + 2 ||
      ratio.size() != size.size()) {
    fail(node, "a size and a ratio for each spatial axis of 1 to 3", x.str());
  }
  if (mode != "nearest" && mode != "linear") fail(node, "mode nearest or linear", mode);
  if (!ir::is_floating(x.dtype)) fail(node, "a floating operand", x.str());
  Dims dims{x.dims[0], x.dims[1]};
  dims.insert(dims.end(), size.begin(), size.end());
  return {{x.dtype, dims}};
}

Cost resize_cost(const Graph& graph, const Node& node) {
  const double points = node.s("mode") == "nearest"
                            ? 0
                            : std::pow(2.0, static_cast<double>(node.floats("ratio").size()));
  return {2 * points * static_cast<double>(result_type(graph, node).num_elements()),
          traffic_bytes(graph, node)};
}

// The elements an element of the result is made of, along one axis.
struct Points {
  int64_t first, second;
  double weight;  // of the second
};

Points points_at(const Node& node, int64_t i, int64_t size, double ratio) {
  if (node.s("mode") == "nearest") {
    const int64_t at = std::min(static_cast<int64_t>(std::floor(static_cast<float>(i) *
                                                                static_cast<float>(ratio))),
                                size - 1);
    return {at, at, 0};
  }
  const bool corners = node.i_or("align_corners", 0) != 0;
  const double real = corners ? ratio * static_cast<double>(i)
                              : std::max(0.0, ratio * (static_cast<double>(i) + 0.5) - 0.5);
  const int64_t first = std::min(static_cast<int64_t>(real), size - 1);
  return {first, std::min(first + 1, size - 1), std::min(real - static_cast<double>(first), 1.0)};
}

std::vector<HostTensor> reference_resize(const Node& node, const HostOperands& in,
                                         const Types& out) {
  const std::vector<double> xs = to_doubles(*in[0]);
  const std::vector<int64_t> shape = sizes(in[0]->type.dims), result = sizes(out[0].dims);
  const auto& ratio = node.floats("ratio");
  // One axis after the other: the result of one is the input of the next.
  std::vector<double> values = xs;
  std::vector<int64_t> now = shape;
  for (size_t axis = 2; axis < shape.size(); ++axis) {
    int64_t outer = 1, inner = 1;
    for (size_t i = 0; i < axis; ++i) outer *= now[i];
    for (size_t i = axis + 1; i < now.size(); ++i) inner *= now[i];
    const int64_t size = now[axis], count = result[axis];
    std::vector<double> made(static_cast<size_t>(outer * count * inner));
    for (int64_t o = 0; o < outer; ++o) {
      for (int64_t i = 0; i < count; ++i) {
        const Points p = points_at(node, i, size, ratio[axis - 2]);
        for (int64_t n = 0; n < inner; ++n) {
          const double a = values[static_cast<size_t>((o * size + p.first) * inner + n)];
          const double b = values[static_cast<size_t>((o * size + p.second) * inner + n)];
          made[static_cast<size_t>((o * count + i) * inner + n)] =
              p.first == p.second ? a : a * (1 - p.weight) + b * p.weight;
        }
      }
    }
    values = std::move(made);
    now[axis] = count;
  }
  return {from_doubles(out[0], values)};
}

}  // namespace

extern const OpDef kResize{"resize", 1, 1, kNone, infer_resize, resize_cost, reference_resize};

}  // namespace rm::ops
