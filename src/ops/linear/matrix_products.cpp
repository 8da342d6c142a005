// matmul, linear and gemm (made by fusion). Products accumulate in double and round once.
#include "ops/ewise_opcodes.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Dim;
using ir::Dims;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Dims leading(const Dims& dims, size_t trailing) {
  return Dims(dims.begin(), dims.end() - static_cast<std::ptrdiff_t>(trailing));
}

// x[*, M, K] by b: [*, K, N], or [*, N, K] when transposed.
Dims product_dims(const Node& node, const TensorType& a, const TensorType& b, bool transposed) {
  check_dtype(node, b, a.dtype, "both operands");
  if (a.rank() < 2 || b.rank() < 2)
    fail(node, "operands of rank >= 2", a.str() + " and " + b.str());
  const Dim& b_k = b.dims[b.rank() - (transposed ? 1 : 2)];
  const Dim& b_n = b.dims[b.rank() - (transposed ? 2 : 1)];
  unify(node, a.dims.back(), b_k, "inner sizes");
  Dims dims = broadcast(node, leading(a.dims, 2), leading(b.dims, 2));
  dims.push_back(a.dims[a.rank() - 2]);
  dims.push_back(b_n);
  return dims;
}

Types infer_matmul(const Graph& graph, const Node& node) {
  const TensorType &a = operand_type(graph, node, 0), &b = operand_type(graph, node, 1);
  return {{a.dtype, product_dims(node, a, b, false)}};
}

void check_bias(const Graph& graph, const Node& node, const TensorType& x, const Dim& n) {
  if (!present(node, 2)) return;
  const TensorType& bias = operand_type(graph, node, 2);
  check_dtype(node, bias, x.dtype, "a bias");
  check_rank(node, bias, 1, "a bias");
  unify(node, bias.dims[0], n, "the bias and the columns");
}

Types infer_linear(const Graph& graph, const Node& node) {
  const TensorType &x = operand_type(graph, node, 0), &w = operand_type(graph, node, 1);
  check_dtype(node, w, x.dtype, "a weight");
  check_rank(node, w, 2, "a weight");
  if (x.rank() < 1) fail(node, "an operand of rank >= 1", x.str());
  unify(node, x.dims.back(), w.dims[1], "inner sizes");
  check_bias(graph, node, x, w.dims[0]);
  Dims dims = leading(x.dims, 1);
  dims.push_back(w.dims[0]);
  return {{x.dtype, dims}};
}

int activation_opcode(const Node& node) {
  std::string name = node.s_or("activation", "none");
  if (name == "none") return ewise::kCopy;
  for (const char* known : {"relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid"}) {
    if (name == known) return find_opcode(name)->opcode;
  }
  fail(node, "activation none, relu, gelu, gelu_tanh, silu, tanh or sigmoid", "'" + name + "'");
}

Types infer_gemm(const Graph& graph, const Node& node) {
  const TensorType &x = operand_type(graph, node, 0), &w = operand_type(graph, node, 1);
  activation_opcode(node);
  TensorType out{x.dtype, product_dims(node, x, w, node.i_or("trans_b", 0) != 0)};
  check_bias(graph, node, x, out.dims.back());
  if (present(node, 3)) {
    const TensorType& residual = operand_type(graph, node, 3);
    check_dtype(node, residual, x.dtype, "a residual");
    check_rank(node, residual, out.rank(), "a residual");
    for (size_t d = 0; d < out.rank(); ++d) {
      unify(node, out.dims[d], residual.dims[d], "the residual and the result");
    }
  }
  return {out};
}

Cost product_cost(const Graph& graph, const Node& node) {
  auto out = static_cast<double>(result_type(graph, node).num_elements());
  auto k = static_cast<double>(operand_type(graph, node, 0).dims.back().value());
  return {2.0 * out * k, traffic_bytes(graph, node)};
}

// Row-major product over broadcast leading dims, as doubles.
std::vector<double> multiply(const HostTensor& a, const HostTensor& b, const Dims& out,
                             bool transposed) {
  Dims lead = leading(out, 2);
  int64_t m = out[out.size() - 2].value(), n = out.back().value(), k = a.type.dims.back().value();
  std::vector<int64_t> at_a = broadcast_offsets(leading(a.type.dims, 2), lead);
  std::vector<int64_t> at_b = broadcast_offsets(leading(b.type.dims, 2), lead);
  std::vector<double> x = to_doubles(a), w = to_doubles(b), y;
  for (size_t batch = 0; batch < at_a.size(); ++batch) {
    const double* pa = x.data() + at_a[batch] * m * k;
    const double* pb = w.data() + at_b[batch] * k * n;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0;
        for (int64_t p = 0; p < k; ++p) {
          sum += pa[i * k + p] * (transposed ? pb[j * k + p] : pb[p * n + j]);
        }
        y.push_back(sum);
      }
    }
  }
  return y;
}

std::vector<HostTensor> reference_matmul(const Node&, const HostOperands& in, const Types& out) {
  return {from_doubles(out[0], multiply(*in[0], *in[1], out[0].dims, false))};
}

const HostTensor* optional(const HostOperands& in, size_t i) {
  return i < in.size() ? in[i] : nullptr;
}

std::vector<double> affine(const HostOperands& in, const Dims& out, bool transposed, double alpha) {
  std::vector<double> y = multiply(*in[0], *in[1], out, transposed);
  std::vector<double> bias;
  if (optional(in, 2) != nullptr) bias = to_doubles(*in[2]);
  auto n = static_cast<size_t>(out.back().value());
  for (size_t i = 0; i < y.size(); ++i) y[i] = alpha * y[i] + (bias.empty() ? 0.0 : bias[i % n]);
  return y;
}

std::vector<HostTensor> reference_linear(const Node&, const HostOperands& in, const Types& out) {
  if (out[0].rank() >= 2) return {from_doubles(out[0], affine(in, out[0].dims, true, 1.0))};
  HostTensor row = *in[0];  // a vector is a matrix of one row
  row.type.dims.insert(row.type.dims.begin(), 1);
  HostOperands operands = in;
  operands[0] = &row;
  return {from_doubles(out[0], affine(operands, {1, out[0].dims[0]}, true, 1.0))};
}

std::vector<HostTensor> reference_gemm(const Node& node, const HostOperands& in, const Types& out) {
  std::vector<double> y =
      affine(in, out[0].dims, node.i_or("trans_b", 0) != 0, node.f_or("alpha", 1.0));
  int activation = activation_opcode(node);
  std::vector<double> residual;
  if (optional(in, 3) != nullptr) residual = to_doubles(*in[3]);
  for (size_t i = 0; i < y.size(); ++i) {
    y[i] = apply_float(activation, y[i], 0, 0) + (residual.empty() ? 0.0 : residual[i]);
  }
  return {from_doubles(out[0], y)};
}

}  // namespace

extern const OpDef kMatmul{"matmul",        2, 2, kContraction, infer_matmul, product_cost,
                           reference_matmul};
extern const OpDef kLinear{"linear",        2, 3, kContraction, infer_linear, product_cost,
                           reference_linear};
extern const OpDef kGemm{"gemm", 2, 4, kContraction, infer_gemm, product_cost, reference_gemm};

}  // namespace rm::ops
