// pool: the largest or the mean of each window.
#include <cmath>
#include <limits>

#include "ops/vision/windows.hpp"

namespace rm::ops {
namespace {

using ir::Dims;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Types infer_pool(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, 0);
  const auto& kernel = node.ints("kernel");
  const size_t axes = kernel.size();
  if (axes < 1 || axes > 3 || x.rank() != axes + 2) {
    fail(node, "a kernel size for each spatial axis of 1 to 3", x.str());
  }
  const std::string& kind = node.s("kind");
  if (kind != "max" && kind != "mean") fail(node, "kind max or mean", kind);
  if (kind == "mean" && !ir::is_floating(x.dtype)) fail(node, "a floating operand", x.str());
  const Windows w = windows_of(node, axes);
  Dims dims{x.dims[0], x.dims[1]};
  for (size_t a = 0; a < axes; ++a) {
    if (kernel[a] < 1) fail(node, "kernels of at least 1", std::to_string(kernel[a]));
    dims.push_back(window_count(node, w, a, x.dims[2 + a], kernel[a]));
  }
  return {{x.dtype, dims}};
}

Cost pool_cost(const Graph& graph, const Node& node) {
  double window = 1;
  for (int64_t k : node.ints("kernel")) window *= static_cast<double>(k);
  return {window * static_cast<double>(result_type(graph, node).num_elements()),
          traffic_bytes(graph, node)};
}

// Every place of an axis-by-axis index, the last axis fastest.
bool next(std::vector<int64_t>& at, const std::vector<int64_t>& sizes) {
  for (size_t i = at.size(); i-- > 0;) {
    if (++at[i] < sizes[i]) return true;
    at[i] = 0;
  }
  return false;
}

struct Window {
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  int64_t inside = 0;   // elements of the input
  int64_t counted = 0;  // and of the padding that torch counts
};

Window look(const Windows& w, const std::vector<int64_t>& kernel, const std::vector<int64_t>& sizes,
            const std::vector<int64_t>& place, const double* plane) {
  Window out;
  std::vector<int64_t> k(kernel.size(), 0);
  do {
    int64_t offset = 0;
    bool inside = true, padded = true;
    for (size_t a = 0; a < k.size(); ++a) {
      const int64_t i = place[a] * w.stride[a] - w.begin[a] + k[a] * w.dilation[a];
      inside = inside && i >= 0 && i < sizes[a];
      padded = padded && i < sizes[a] + w.begin[a];  // torch pads both ends alike
      offset = offset * sizes[a] + i;
    }
    out.counted += padded ? 1 : 0;
    if (!inside) continue;
    const double v = plane[offset];
    out.largest = std::isnan(out.largest) || v <= out.largest ? out.largest : v;
    out.sum += v;
    ++out.inside;
  } while (next(k, kernel));
  return out;
}

std::vector<HostTensor> reference_pool(const Node& node, const HostOperands& in, const Types& out) {
  const TensorType& x = in[0]->type;
  const auto& kernel = node.ints("kernel");
  const Windows w = windows_of(node, kernel.size());
  const bool mean = node.s("kind") == "mean";
  const int64_t divisor = node.i_or("divisor", 0);
  const bool padding_counts = node.i_or("count_include_pad", 1) != 0;
  const std::vector<int64_t> shape = sizes(x.dims), result = sizes(out[0].dims);
  const std::vector<int64_t> plane(shape.begin() + 2, shape.end()),
      places(result.begin() + 2, result.end());
  int64_t plane_size = 1;
  for (int64_t s : plane) plane_size *= s;
  const std::vector<double> xs = to_doubles(*in[0]);
  std::vector<double> ys;
  for (int64_t p = 0; p < shape[0] * shape[1] && out[0].num_elements() > 0; ++p) {
    std::vector<int64_t> place(places.size(), 0);
    do {
      const Window seen = look(w, kernel, plane, place, xs.data() + p * plane_size);
      const int64_t count = divisor != 0 ? divisor : padding_counts ? seen.counted : seen.inside;
      ys.push_back(mean ? seen.sum / static_cast<double>(count) : seen.largest);
    } while (next(place, places));
  }
  return {from_doubles(out[0], ys)};
}

}  // namespace

extern const OpDef kPool{"pool", 1, 1, kReduction, infer_pool, pool_cost, reference_pool};

}  // namespace rm::ops
