// recurrent: one layer of an LSTM, GRU or plain RNN in one direction, over all steps of a sequence.
//
// Its input is the layer's input times its weight already, the gates of all steps at once, so what
// is left of a step is the product with the state and the gates.
#include <algorithm>
#include <cmath>

#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

enum Operand : size_t { kX, kW, kH, kC, kBias, kProj };

int64_t gates_of(const Node& node) {
  const std::string& cell = node.s("cell");
  if (cell == "lstm") return 4;
  if (cell == "gru") return 3;
  if (cell != "tanh" && cell != "relu") fail(node, "cell lstm, gru, tanh or relu", cell);
  return 1;
}

size_t time_axis(const Node& node) { return node.i_or("batch_first", 0) != 0 ? 1 : 0; }

/// Throws unless operand `i` has x's element type and these dims.
void check(const Graph& graph, const Node& node, size_t i, const ir::Dims& dims) {
  const TensorType& type = operand_type(graph, node, i);
  check_dtype(node, type, operand_type(graph, node, kX).dtype, "all operands");
  check_rank(node, type, dims.size(), "operand");
  for (size_t d = 0; d < dims.size(); ++d) unify(node, type.dims[d], dims[d], "sizes");
}

Types infer_recurrent(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, kX);
  if (x.dtype != ir::DType::kF32 && x.dtype != ir::DType::kBF16 && x.dtype != ir::DType::kF16) {
    fail(node, "f32, bf16 or f16", x.str());
  }
  check_rank(node, x, 3, "x");
  const int64_t gates = gates_of(node);
  const bool is_lstm = gates == 4;
  const TensorType& w = operand_type(graph, node, kW);
  check_rank(node, w, 2, "weight");
  if (!w.dims[0].is_static() || w.dims[0].value() % gates != 0) {
    fail(node, "rows of the weight for " + std::to_string(gates) + " gates", w.str());
  }
  const ir::Dim rows = w.dims[0], hidden = w.dims[0].value() / gates, out = w.dims[1];
  check_dtype(node, w, x.dtype, "all operands");
  unify(node, x.dims[2], rows, "gates");
  const ir::Dim& batch = x.dims[1 - time_axis(node)];
  check(graph, node, kH, {batch, out});
  if (present(node, kC) != is_lstm) fail(node, "a cell state with an lstm alone", node.s("cell"));
  if (is_lstm) check(graph, node, kC, {batch, hidden});
  if (present(node, kBias)) check(graph, node, kBias, {rows});
  if (present(node, kProj)) {
    if (!is_lstm) fail(node, "a projection with an lstm alone", node.s("cell"));
    check(graph, node, kProj, {out, hidden});
  } else {
    unify(node, out, hidden, "state and hidden size");
  }
  Types types{{x.dtype, {x.dims[0], x.dims[1], out}}, {x.dtype, {batch, out}}};
  if (is_lstm) types.push_back({x.dtype, {batch, hidden}});
  return types;
}

Cost recurrent_cost(const Graph& graph, const Node& node) {
  const auto states = static_cast<double>(result_type(graph, node).num_elements());  // T * B * R
  const auto rows = static_cast<double>(operand_type(graph, node, kW).dims[0].value());
  double flops = (2 * rows + 10) * states;
  if (present(node, kProj)) flops += 2 * rows / 4 * states;
  return {flops, traffic_bytes(graph, node)};
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

/// The layer's numbers as doubles, and one step of one row of the batch.
struct Layer {
  std::string cell;
  size_t gates, hidden, out;
  std::vector<double> w, bias, proj;

  // h: [out] and c: [hidden] are read and replaced; x: the row's gates.
  void step(const double* x, double* h, double* c) const {
    std::vector<double> sums(gates * hidden), made(hidden);
    for (size_t n = 0; n < sums.size(); ++n) {
      sums[n] = bias.empty() ? 0 : bias[n];
      for (size_t k = 0; k < out; ++k) sums[n] += w[n * out + k] * h[k];
    }
    for (size_t j = 0; j < hidden; ++j) {
      auto part = [&](size_t gate) { return sums[gate * hidden + j]; };
      auto gate = [&](size_t which) { return x[which * hidden + j] + part(which); };
      if (cell == "lstm") {
        c[j] = sigmoid(gate(1)) * c[j] + sigmoid(gate(0)) * std::tanh(gate(2));
        made[j] = sigmoid(gate(3)) * std::tanh(c[j]);
      } else if (cell == "gru") {
        const double n = std::tanh(x[2 * hidden + j] + sigmoid(gate(0)) * part(2));
        made[j] = n + sigmoid(gate(1)) * (h[j] - n);
      } else {
        const double sum = gate(0);
        made[j] = cell == "tanh" ? std::tanh(sum) : sum < 0 ? 0 : sum;  // NaN stays
      }
    }
    if (proj.empty()) {
      std::copy(made.begin(), made.end(), h);
      return;
    }
    for (size_t r = 0; r < out; ++r) {
      h[r] = 0;
      for (size_t j = 0; j < hidden; ++j) h[r] += proj[r * hidden + j] * made[j];
    }
  }
};

std::vector<HostTensor> reference_recurrent(const Node& node, const HostOperands& in,
                                            const Types& out) {
  auto optional = [&](size_t i) {
    return i < in.size() && in[i] != nullptr ? to_doubles(*in[i]) : std::vector<double>{};
  };
  const size_t time = time_axis(node);
  const auto steps = static_cast<size_t>(out[0].dims[time].value()),
             batch = static_cast<size_t>(out[0].dims[1 - time].value());
  const auto gates = static_cast<size_t>(gates_of(node));
  const Layer layer{node.s("cell"),
                    gates,
                    static_cast<size_t>(in[kW]->type.dims[0].value()) / gates,
                    static_cast<size_t>(in[kW]->type.dims[1].value()),
                    to_doubles(*in[kW]),
                    optional(kBias),
                    optional(kProj)};
  const std::vector<double> x = to_doubles(*in[kX]);
  std::vector<double> h = to_doubles(*in[kH]), c = optional(kC), y(steps * batch * layer.out);
  const bool reverse = node.i_or("reverse", 0) != 0;
  for (size_t n = 0; n < steps; ++n) {
    const size_t t = reverse ? steps - 1 - n : n;
    for (size_t b = 0; b < batch; ++b) {
      const size_t row = time == 0 ? t * batch + b : b * steps + t;
      layer.step(x.data() + row * gates * layer.hidden, h.data() + b * layer.out,
                 c.data() + b * layer.hidden * (c.empty() ? 0 : 1));
      std::copy_n(h.data() + b * layer.out, layer.out, y.data() + row * layer.out);
    }
  }
  std::vector<HostTensor> results{from_doubles(out[0], y), from_doubles(out[1], h)};
  if (out.size() > 2) results.push_back(from_doubles(out[2], c));
  return results;
}

}  // namespace

extern const OpDef kRecurrent{"recurrent",     3,
                              6,               kContraction,
                              infer_recurrent, recurrent_cost,
                              reference_recurrent};

}  // namespace rm::ops
