// scan: a running product, maximum, minimum or logarithm of a sum of exponentials along an axis.
// (The running sum is cumsum.) Floats run in double, integers in 64 bits.
#include <cmath>
#include <string>

#include "ir/scalar.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::DType;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Types infer_scan(const Graph& graph, const Node& node) {
  TensorType out = operand_type(graph, node, 0);
  axis_of(node, out.rank());
  const bool floats = ir::is_floating(out.dtype);
  const std::string kind = node.s("kind");
  if (kind == "prod") {
    if (!floats) out.dtype = DType::kI64;
  } else if (kind == "logsumexp") {
    if (!floats) fail(node, "floats", "another type");
  } else if (kind != "max" && kind != "min") {
    fail(node, "kind prod, max, min or logsumexp", "'" + kind + "'");
  }
  return {out};
}

double next_float(const std::string& kind, double so_far, double x) {
  if (kind == "prod") return so_far * x;
  if (std::isnan(so_far) || std::isnan(x)) return std::nan("");
  if (kind == "max") return x > so_far ? x : so_far;
  if (kind == "min") return x < so_far ? x : so_far;
  const double most = x > so_far ? x : so_far;
  return std::isinf(most) ? most : most + std::log1p(std::exp(-std::fabs(so_far - x)));
}

int64_t next_int(const std::string& kind, int64_t so_far, int64_t x) {
  if (kind == "max") return x > so_far ? x : so_far;
  if (kind == "min") return x < so_far ? x : so_far;
  return static_cast<int64_t>(static_cast<uint64_t>(so_far) * static_cast<uint64_t>(x));
}

std::vector<HostTensor> reference_scan(const Node& node, const HostOperands& in, const Types& out) {
  const AxisSplit s = split_at(out[0].dims, axis_of(node, out[0].rank()));
  const std::string kind = node.s("kind");
  const DType from = in[0]->type.dtype, to = out[0].dtype;
  HostTensor y = zeros(out[0]);
  for (int64_t line = 0; line < s.outer * s.inner; ++line) {
    double value = 0;
    int64_t number = 0;
    for (int64_t k = 0; k < s.size; ++k) {
      const int64_t at = (line / s.inner * s.size + k) * s.inner + line % s.inner;
      if (ir::is_floating(to)) {
        const double x = ir::load_element(from, in[0]->at(at));
        value = k == 0 ? x : next_float(kind, value, x);
        ir::store_element(to, y.at(at), value);
      } else {
        const int64_t x = ir::load_int(from, in[0]->at(at));
        number = k == 0 ? x : next_int(kind, number, x);
        ir::store_int(to, y.at(at), number);
      }
    }
  }
  return {y};
}

Cost scan_cost(const Graph& graph, const Node& node) {
  const Cost moved = copy_cost(graph, node);
  return {moved.bytes / 8, moved.bytes};
}

}  // namespace

extern const OpDef kScan{"scan", 1, 1, kNone, infer_scan, scan_cost, reference_scan};

}  // namespace rm::ops
