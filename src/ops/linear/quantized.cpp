// quantize and quant_linear: weights of 8 or 4 bits in groups along K (docs/operators.md has the
// layout). The reference of quantize is what kernels must give bit for bit.
#include "ops/linear/quantized.hpp"

#include <cmath>

#include "ir/scalar.hpp"
#include "ops/ewise_opcodes.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Dim;
using ir::Dims;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

QuantLayout layout_of(const Node& node, int64_t k, int64_t rows = 0) {
  const int64_t bits = node.i_or("bits", 8), group = node.i_or("group", 32);
  if (bits != 8 && bits != 4) fail(node, "bits 8 or 4", std::to_string(bits));
  if (group != 32 && group != 64 && group != 128) {
    fail(node, "group 32, 64 or 128", std::to_string(group));
  }
  const int64_t tile = node.i_or("tile", 1);
  if (tile != 1 && tile != QuantLayout::kTile) fail(node, "tile 1 or 8", std::to_string(tile));
  const bool pairs = node.i_or("pairs", 0) != 0;
  if (pairs && tile != 1) fail(node, "tile 1 with pairs", "tile 8");
  return {k, bits, group, rows, tile, pairs};
}

/// Scales: of the type of the weight (or of x) in pairs, else f16.
TensorType scales_of(const QuantLayout& q, const Dim& n, DType type) {
  if (q.pairs) return {type, {q.groups(), n}};
  return {DType::kF16, {n, q.groups()}};
}

/// Bits of x where a product reads few rows of it.
void check_activations(const Node& node, const QuantLayout& q) {
  const int64_t bits = node.i_or("x_bits", 16);
  if (bits != 16 && bits != 8) fail(node, "x_bits 16 or 8", std::to_string(bits));
  if (bits == 8 && q.tile == 1) fail(node, "tile 8 with x_bits 8", "tile 1");
  if (q.tile != 1 && present(node, 3)) fail(node, "no zero points with tile 8", "zero points");
  if (q.pairs && present(node, 3)) fail(node, "no zero points with pairs", "zero points");
}

int64_t static_inner(const Node& node, const TensorType& type) {
  if (type.rank() == 0 || !type.dims.back().is_static()) {
    fail(node, "a static last axis", type.str());
  }
  return type.dims.back().value();
}

Types infer_quantize(const Graph& graph, const Node& node) {
  const TensorType& w = operand_type(graph, node, 0);
  check_rank(node, w, 2, "a weight");
  if (!ir::is_floating(w.dtype)) fail(node, "a floating weight", w.str());
  const QuantLayout q = layout_of(node, static_inner(node, w));
  const Dim& n = w.dims[0];
  if ((q.tile != 1 || q.pairs) && node.i_or("symmetric", 1) == 0) {
    fail(node, "symmetric weights with tile 8 or pairs", "zero points");
  }
  Types out{{q.bits == 8 ? DType::kI8 : DType::kU8, {n, q.row_bytes()}}, scales_of(q, n, w.dtype)};
  if (node.i_or("symmetric", 1) == 0) out.push_back({DType::kF16, {n, q.groups()}});
  return out;
}

Types infer_quant_linear(const Graph& graph, const Node& node) {
  const TensorType &x = operand_type(graph, node, 0), &w = operand_type(graph, node, 1);
  if (!ir::is_floating(x.dtype)) fail(node, "floating activations", x.str());
  const QuantLayout q = layout_of(node, static_inner(node, x));
  check_activations(node, q);
  check_rank(node, w, 2, "a quantised weight");
  check_dtype(node, w, q.bits == 8 ? DType::kI8 : DType::kU8, "a quantised weight");
  unify(node, w.dims[1], q.row_bytes(), "the bytes of a row and the layout");
  for (size_t i : {size_t{2}, size_t{3}}) {
    if (i == 3 && !present(node, i)) continue;
    const TensorType& t = operand_type(graph, node, i);
    const TensorType wanted = scales_of(q, w.dims[0], x.dtype);
    check_rank(node, t, 2, "scales and zero points");
    check_dtype(node, t, wanted.dtype, "scales and zero points");
    for (size_t d : {size_t{0}, size_t{1}}) {
      unify(node, t.dims[d], wanted.dims[d], "scales, and rows of the weight and their groups");
    }
  }
  Dims dims(x.dims.begin(), x.dims.end() - 1);
  dims.push_back(w.dims[0]);
  if (present(node, 4)) {
    const TensorType& bias = operand_type(graph, node, 4);
    check_dtype(node, bias, x.dtype, "a bias");
    check_rank(node, bias, 1, "a bias");
    unify(node, bias.dims[0], w.dims[0], "the bias and the columns");
  }
  if (present(node, 5)) {
    const TensorType& residual = operand_type(graph, node, 5);
    check_dtype(node, residual, x.dtype, "a residual");
    check_rank(node, residual, dims.size(), "a residual");
    for (size_t d = 0; d < dims.size(); ++d) {
      unify(node, dims[d], residual.dims[d], "the residual and the result");
    }
  }
  return {{x.dtype, dims}};
}

Cost quantize_cost(const Graph& graph, const Node& node) {
  return {4.0 * static_cast<double>(operand_type(graph, node, 0).num_elements()),
          traffic_bytes(graph, node)};
}

Cost quant_linear_cost(const Graph& graph, const Node& node) {
  auto out = static_cast<double>(result_type(graph, node).num_elements());
  auto k = static_cast<double>(operand_type(graph, node, 0).dims.back().value());
  return {2.0 * out * k, traffic_bytes(graph, node)};
}

/// Rounded to the scales' type.
float stored(float x, DType type, std::string* store) {
  char bytes[8];
  ir::store_element(type, bytes, x);
  store->assign(bytes, ir::size_bytes(type));
  return static_cast<float>(ir::load_element(type, bytes));
}

struct Group {
  float scale, zero;
  std::string scale_bytes, zero_bytes;
};

// Symmetric: the value of largest magnitude becomes the lowest integer (4 bits) or +-127.
Group symmetric_group(const float* w, int64_t n, int64_t bits, DType type) {
  float most = 0;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    if (std::fabs(w[i]) > std::fabs(most)) most = w[i];
    finite = finite && std::isfinite(w[i]);
  }
  Group g{0, bits == 8 ? 0.0f : 8.0f, {}, {}};
  const float wanted = bits == 8 ? std::fabs(most) / 127.0f : most / -8.0f;
  g.scale = stored(finite ? wanted : std::nanf(""), type, &g.scale_bytes);
  return g;
}

Group affine_group(const float* w, int64_t n, int64_t bits) {
  float low = 0, high = 0;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    low = w[i] < low ? w[i] : low;
    high = w[i] > high ? w[i] : high;
    finite = finite && std::isfinite(w[i]);
  }
  Group g{};
  const float levels = bits == 8 ? 255.0f : 15.0f, first = bits == 8 ? -128.0f : 0.0f;
  g.scale = stored(finite ? (high - low) / levels : std::nanf(""), DType::kF16, &g.scale_bytes);
  const float zero = g.scale > 0 ? std::nearbyint(first - low / g.scale) : first;
  g.zero = stored(zero, DType::kF16, &g.zero_bytes);
  return g;
}

int quantized(float w, const Group& g, int64_t bits, bool symmetric) {
  if (!(g.scale != 0) || std::isnan(g.scale)) return static_cast<int>(g.zero);
  const float low = bits == 4 ? 0 : symmetric ? -127 : -128, high = bits == 4 ? 15 : 127;
  const float q = std::nearbyint(w / g.scale) + g.zero;
  return static_cast<int>(q < low ? low : q > high ? high : q);
}

std::vector<HostTensor> reference_quantize(const Node& node, const HostOperands& in,
                                           const Types& out) {
  const int64_t n = in[0]->type.dims[0].value(), k = in[0]->type.dims[1].value();
  const QuantLayout layout = layout_of(node, k, n);
  const bool symmetric = node.i_or("symmetric", 1) != 0;
  const std::vector<double> w = to_doubles(*in[0]);
  std::vector<HostTensor> results;
  for (const TensorType& type : out) results.push_back(zeros(type));
  std::vector<float> row(static_cast<size_t>(k));
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t i = 0; i < k; ++i) {
      row[static_cast<size_t>(i)] = static_cast<float>(w[static_cast<size_t>(r * k + i)]);
    }
    auto* bytes = reinterpret_cast<uint8_t*>(results[0].bytes.data());
    for (int64_t g = 0; g < layout.groups(); ++g) {
      const int64_t from = g * layout.group, count = std::min(layout.group, k - from);
      const Group group =
          symmetric ? symmetric_group(row.data() + from, count, layout.bits, out[1].dtype)
                    : affine_group(row.data() + from, count, layout.bits);
      const int64_t at = layout.scale_at(r, g);
      group.scale_bytes.copy(results[1].at(at), group.scale_bytes.size());
      if (!symmetric) group.zero_bytes.copy(results[2].at(at), 2);
      for (int64_t i = from; i < from + count; ++i) {
        const int q = quantized(row[static_cast<size_t>(i)], group, layout.bits, symmetric);
        layout.put(bytes, r, i, q);
      }
    }
  }
  return results;
}

std::vector<HostTensor> reference_quant_linear(const Node& node, const HostOperands& in,
                                               const Types& out) {
  const auto has = [&](size_t i) { return i < in.size() && in[i] != nullptr; };
  const int64_t k = in[0]->type.dims.back().value(), n = in[1]->type.dims[0].value();
  const QuantLayout layout = layout_of(node, k, n);
  const std::vector<double> x = to_doubles(*in[0]), scale = to_doubles(*in[2]);
  const std::vector<double> zero = has(3) ? to_doubles(*in[3]) : std::vector<double>{};
  const std::vector<double> bias = has(4) ? to_doubles(*in[4]) : std::vector<double>{};
  const std::vector<double> residual = has(5) ? to_doubles(*in[5]) : std::vector<double>{};
  const std::string activation = node.s_or("activation", "none");
  const int opcode = activation == "none" ? ewise::kCopy : find_opcode(activation)->opcode;
  const auto* bytes = reinterpret_cast<const uint8_t*>(in[1]->bytes.data());
  const int64_t rows =
      k == 0 ? out[0].num_elements() / std::max<int64_t>(n, 1) : static_cast<int64_t>(x.size()) / k;
  std::vector<double> y;
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t r = 0; r < n; ++r) {
      double sum = 0;
      for (int64_t i = 0; i < k; ++i) {
        const auto g = static_cast<size_t>(layout.scale_at(r, i / layout.group));
        const double z = !zero.empty() ? zero[g] : layout.bits == 4 ? 8 : 0;
        const double q = layout.get(bytes, r, i);
        sum += x[static_cast<size_t>(m * k + i)] * ((q - z) * scale[g]);
      }
      if (!bias.empty()) sum += bias[static_cast<size_t>(r)];
      const auto at = static_cast<size_t>(m * n + r);
      y.push_back(apply_float(opcode, sum, 0, 0) + (residual.empty() ? 0.0 : residual[at]));
    }
  }
  return {from_doubles(out[0], y)};
}

}  // namespace

extern const OpDef kQuantize{"quantize",        1, 1, kNone, infer_quantize, quantize_cost,
                             reference_quantize};
extern const OpDef kQuantLinear{
    "quant_linear",        3, 6, kContraction, infer_quant_linear, quant_linear_cost,
    reference_quant_linear};

}  // namespace rm::ops
