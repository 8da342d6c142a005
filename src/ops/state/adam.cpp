// adam: one step of Adam or AdamW for one parameter, all of its results at once. Whoever updates
// states assigns them the results; the step that computes them then writes where the states lie.
#include <cmath>

#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

enum Operand : size_t { kParameter, kGradient, kMean, kSquare, kNumbers, kLargest, kApply };
// Elements of `numbers`.
enum Number : size_t { kDecay, kKeep, kNew1, kOld2, kNew2, kEps, kStep, kRoot, kCount };

Types infer_adam(const Graph& graph, const Node& node) {
  const TensorType& p = operand_type(graph, node, kParameter);
  if (p.dtype != ir::DType::kF32 && p.dtype != ir::DType::kF64) {
    fail(node, "a parameter of f32 or f64", p.str());
  }
  TensorType out = p;
  for (size_t i : {kGradient, kMean, kSquare, kLargest}) {
    if (i == kLargest && !present(node, i)) continue;
    const TensorType& t = operand_type(graph, node, i);
    check_dtype(node, t, p.dtype, "gradient and states");
    check_rank(node, t, p.rank(), "gradient and states");
    for (size_t d = 0; d < p.rank(); ++d) {
      out.dims[d] = unify(node, out.dims[d], t.dims[d], "the parameter, its gradient and its states");
    }
  }
  const TensorType& numbers = operand_type(graph, node, kNumbers);
  check_dtype(node, numbers, p.dtype, "numbers");
  check_rank(node, numbers, 1, "numbers");
  unify(node, numbers.dims[0], ir::Dim(static_cast<int64_t>(kCount)), "the count of numbers");
  if (present(node, kApply)) {
    const TensorType& apply = operand_type(graph, node, kApply);
    check_dtype(node, apply, ir::DType::kBool, "whether it applies");
    check_rank(node, apply, 0, "whether it applies");
  }
  const std::string decay = node.s_or("decay", "none");
  if (decay != "none" && decay != "gradient" && decay != "parameter") {
    fail(node, "decay none, gradient or parameter", decay);
  }
  const int64_t maximize = node.i_or("maximize", 0);
  if (maximize != 0 && maximize != 1) fail(node, "maximize 0 or 1", std::to_string(maximize));
  return Types(present(node, kLargest) ? 4 : 3, out);
}

Cost adam_cost(const Graph& graph, const Node& node) {
  return {14 * static_cast<double>(result_type(graph, node).num_elements()),
          traffic_bytes(graph, node)};
}

std::vector<HostTensor> reference_adam(const Node& node, const HostOperands& in, const Types& out) {
  const auto given = [&](size_t i) { return i < in.size() && in[i] != nullptr; };
  std::vector<HostTensor> unchanged{*in[kParameter], *in[kMean], *in[kSquare]};
  if (given(kLargest)) unchanged.push_back(*in[kLargest]);
  if (given(kApply) && to_ints(*in[kApply])[0] == 0) return unchanged;
  std::vector<std::vector<double>> now;
  for (const HostTensor& t : unchanged) now.push_back(to_doubles(t));
  const std::vector<double> gradient = to_doubles(*in[kGradient]), number = to_doubles(*in[kNumbers]);
  const std::string decay = node.s_or("decay", "none");
  for (size_t i = 0; i < gradient.size(); ++i) {
    double &p = now[0][i], &m = now[1][i], &v = now[2][i];
    double g = node.i_or("maximize", 0) == 1 ? -gradient[i] : gradient[i];
    if (decay == "parameter") p *= number[kKeep];
    if (decay == "gradient") g += p * number[kDecay];
    m += (g - m) * number[kNew1];
    v = v * number[kOld2] + g * g * number[kNew2];
    double second = v;
    if (now.size() > 3) {
      double& largest = now[3][i];
      second = largest = std::isnan(largest) || largest > v ? largest : v;
    }
    p -= m / (std::sqrt(second) / number[kRoot] + number[kEps]) * number[kStep];
  }
  std::vector<HostTensor> results;
  for (size_t i = 0; i < now.size(); ++i) results.push_back(from_doubles(out[i], now[i]));
  return results;
}

}  // namespace

extern const OpDef kAdam{"adam", 5, 7, kNone, infer_adam, adam_cost, reference_adam};

}  // namespace rm::ops
