// conv: 1 to 3 spatial axes, groups, dilation, transposed, with bias, residual and activation.
#include <algorithm>
#include <cmath>

#include "ops/ewise_opcodes.hpp"
#include "ops/vision/windows.hpp"

namespace rm::ops {
namespace {

using ir::Dim;
using ir::Dims;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

constexpr size_t kBias = 2, kResidual = 3;

bool transposed(const Node& node) { return node.i_or("transposed", 0) != 0; }

std::vector<int64_t> output_padding(const Node& node, size_t axes) {
  if (!node.has("output_padding")) return std::vector<int64_t>(axes, 0);
  const auto& given = node.ints("output_padding");
  if (given.size() != axes) {
    fail(node, "an output_padding an axis", std::to_string(given.size()));
  }
  return given;
}

Dim spatial_size(const Node& node, const Windows& w, size_t axis, const Dim& size, int64_t kernel) {
  if (!transposed(node)) return window_count(node, w, axis, size, kernel);
  // The size of the input of a convolution that gives `size` windows.
  return (size - Dim(1)) * Dim(w.stride[axis]) +
         Dim(w.dilation[axis] * (kernel - 1) + 1 - w.begin[axis] - w.end[axis] +
             output_padding(node, w.axes())[axis]);
}

void check_activation(const Node& node) {
  const std::string name = node.s_or("activation", "none");
  const EwiseOpcode* code = find_opcode(name);
  if (name != "none" && name != "hardswish" && (code == nullptr || code->arity != 1)) {
    fail(node, "an activation of docs/operators.md", name);
  }
}

Types infer_conv(const Graph& graph, const Node& node) {
  const TensorType &x = operand_type(graph, node, 0), &w = operand_type(graph, node, 1);
  if (x.rank() < 3 || x.rank() > 5) fail(node, "1 to 3 spatial axes", x.str());
  check_rank(node, w, x.rank(), "a weight");
  check_dtype(node, w, x.dtype, "a weight");
  if (!ir::is_floating(x.dtype)) fail(node, "floating operands", x.str());
  check_activation(node);
  const size_t axes = x.rank() - 2;
  const Windows windows = windows_of(node, axes);
  const int64_t groups = node.i_or("groups", 1);
  if (groups < 1) fail(node, "at least one group", std::to_string(groups));
  const Dim& inner = w.dims[transposed(node) ? 0 : 1];
  unify(node, x.dims[1], transposed(node) ? inner : inner * Dim(groups), "channels");
  if (w.dims[0].is_static() && w.dims[0].value() % groups != 0) {
    fail(node, "channels that groups divide", w.str());
  }
  const Dim channels = transposed(node) ? w.dims[1] * Dim(groups) : w.dims[0];
  if (present(node, kBias)) {
    const TensorType& bias = operand_type(graph, node, kBias);
    check_dtype(node, bias, x.dtype, "a bias");
    check_rank(node, bias, 1, "a bias");
    unify(node, bias.dims[0], channels, "the bias and the channels");
  }
  Dims dims{x.dims[0], channels};
  for (size_t a = 0; a < axes; ++a) {
    dims.push_back(spatial_size(node, windows, a, x.dims[2 + a], w.dims[2 + a].value()));
  }
  if (present(node, kResidual)) {
    const TensorType& residual = operand_type(graph, node, kResidual);
    check_dtype(node, residual, x.dtype, "a residual");
    check_rank(node, residual, dims.size(), "a residual");
    for (size_t i = 0; i < dims.size(); ++i) unify(node, residual.dims[i], dims[i], "sizes");
  }
  return {{x.dtype, dims}};
}

Cost conv_cost(const Graph& graph, const Node& node) {
  const TensorType& w = operand_type(graph, node, 1);
  // A product and a sum for each weight of a channel, at each of its places.
  double places = static_cast<double>(
      (transposed(node) ? operand_type(graph, node, 0) : result_type(graph, node)).num_elements());
  const auto channels = static_cast<double>(w.dims[0].value());
  const double per_place =
      channels == 0 ? 0 : static_cast<double>(w.num_elements()) / channels;
  return {2 * places * per_place, traffic_bytes(graph, node)};
}

double activate(const std::string& name, double v) {
  if (name == "none") return v;
  if (name == "hardswish") return v * std::fmin(std::fmax(v + 3, 0), 6) / 6;
  return apply_float(find_opcode(name)->opcode, v, 0, 0);
}

// Sizes of one problem, spatial axes padded in front to three.
struct Sizes {
  int64_t x[3], y[3], k[3];
};

Sizes sizes_of(const TensorType& x, const TensorType& w, const TensorType& y) {
  Sizes s{{1, 1, 1}, {1, 1, 1}, {1, 1, 1}};
  const size_t axes = x.rank() - 2, front = 3 - axes;
  for (size_t a = 0; a < axes; ++a) {
    s.x[front + a] = x.dims[2 + a].value();
    s.y[front + a] = y.dims[2 + a].value();
    s.k[front + a] = w.dims[2 + a].value();
  }
  return s;
}

Windows padded(const Windows& w) {
  Windows out = w;
  const auto front = static_cast<std::ptrdiff_t>(3 - w.axes());
  for (auto* list : {&out.stride, &out.dilation}) list->insert(list->begin(), front, 1);
  for (auto* list : {&out.begin, &out.end}) list->insert(list->begin(), front, 0);
  return out;
}

// Adds the products of one channel of x with one kernel to one channel of y. A transposed
// convolution is the same relation read from y to x.
void add_channel(const Windows& w, const Sizes& s, bool transposed, const double* x,
                 const double* kernel, double* y) {
  const int64_t* small = transposed ? s.x : s.y;  // the windows
  const int64_t* large = transposed ? s.y : s.x;  // what they slide over
  for (int64_t k0 = 0; k0 < s.k[0]; ++k0) {
    for (int64_t k1 = 0; k1 < s.k[1]; ++k1) {
      for (int64_t k2 = 0; k2 < s.k[2]; ++k2) {
        const double weight = kernel[(k0 * s.k[1] + k1) * s.k[2] + k2];
        for (int64_t a0 = 0; a0 < small[0]; ++a0) {
          const int64_t b0 = window_element(w, 0, a0, k0, large[0]);
          for (int64_t a1 = 0; b0 >= 0 && a1 < small[1]; ++a1) {
            const int64_t b1 = window_element(w, 1, a1, k1, large[1]);
            for (int64_t a2 = 0; b1 >= 0 && a2 < small[2]; ++a2) {
              const int64_t b2 = window_element(w, 2, a2, k2, large[2]);
              if (b2 < 0) continue;
              const int64_t a = (a0 * small[1] + a1) * small[2] + a2;
              const int64_t b = (b0 * large[1] + b1) * large[2] + b2;
              y[transposed ? b : a] += weight * x[transposed ? a : b];
            }
          }
        }
      }
    }
  }
}

std::vector<HostTensor> reference_conv(const Node& node, const HostOperands& in, const Types& out) {
  const TensorType &x = in[0]->type, &w = in[1]->type, &y = out[0];
  const bool turned = transposed(node);
  const Windows windows = padded(windows_of(node, x.rank() - 2));
  const Sizes s = sizes_of(x, w, y);
  const int64_t batch = x.dims[0].value(), from = x.dims[1].value(), to = y.dims[1].value();
  const int64_t groups = node.i_or("groups", 1), from_each = from / groups, to_each = to / groups;
  const int64_t x_plane = s.x[0] * s.x[1] * s.x[2], y_plane = s.y[0] * s.y[1] * s.y[2],
                kernel = s.k[0] * s.k[1] * s.k[2];
  const std::vector<double> xs = to_doubles(*in[0]), ws = to_doubles(*in[1]);
  auto optional = [&](size_t i) {
    return i < in.size() && in[i] != nullptr ? to_doubles(*in[i]) : std::vector<double>{};
  };
  const std::vector<double> bias = optional(kBias), residual = optional(kResidual);
  const std::string activation = node.s_or("activation", "none");
  std::vector<double> ys(static_cast<size_t>(batch * to * y_plane), 0.0);
  for (int64_t n = 0; n < batch; ++n) {
    for (int64_t o = 0; o < to; ++o) {
      double* plane = ys.data() + (n * to + o) * y_plane;
      for (int64_t c = 0; c < from_each; ++c) {
        const int64_t i = o / to_each * from_each + c;
        const int64_t at = turned ? i * to_each + o % to_each : o * from_each + c;
        add_channel(windows, s, turned, xs.data() + (n * from + i) * x_plane,
                    ws.data() + at * kernel, plane);
      }
      for (int64_t p = 0; p < y_plane; ++p) {
        const auto place = static_cast<size_t>((n * to + o) * y_plane + p);
        plane[p] = activate(activation, plane[p] + (bias.empty() ? 0 : bias[static_cast<size_t>(o)]) +
                                            (residual.empty() ? 0 : residual[place]));
      }
    }
  }
  return {from_doubles(y, ys)};
}

}  // namespace

extern const OpDef kConv{"conv", 2, 4, kContraction, infer_conv, conv_cost, reference_conv};

}  // namespace rm::ops
