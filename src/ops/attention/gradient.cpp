// sdpa_backward: the gradients of q, k and v from what sdpa read and gave.
#include <cmath>
#include <limits>

#include "ops/infer.hpp"
#include "ops/registry.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

// The first five are sdpa's own.
enum Operand : size_t { kQ, kK, kV, kMask, kLast, kY, kLse, kDy };

Node forward_of(const Node& node) {
  Node out;
  out.op = "sdpa";
  out.operands.assign(node.operands.begin(), node.operands.begin() + kY);
  out.attrs = node.attrs;
  out.attrs["lse"] = int64_t{1};
  return out;
}

Types infer_sdpa_backward(const Graph& graph, const Node& node) {
  for (size_t i : {kDy, kY, kLse}) operand_type(graph, node, i);  // all eight have a place
  const Types made = get("sdpa").infer(graph, forward_of(node));
  for (size_t i : {kY, kLse, kDy}) {
    const TensorType &t = operand_type(graph, node, i), &wanted = made[i == kLse ? 1 : 0];
    check_dtype(node, t, wanted.dtype, "what sdpa gave and its gradient");
    check_rank(node, t, wanted.rank(), "what sdpa gave and its gradient");
    for (size_t d = 0; d < t.rank(); ++d) {
      unify(node, t.dims[d], wanted.dims[d], "what sdpa gave and its gradient");
    }
  }
  return {operand_type(graph, node, kQ), operand_type(graph, node, kK),
          operand_type(graph, node, kV)};
}

Cost sdpa_backward_cost(const Graph& graph, const Node& node) {
  auto queries = static_cast<double>(operand_type(graph, node, kQ).num_elements());
  auto outputs = static_cast<double>(operand_type(graph, node, kY).num_elements());
  auto keys = static_cast<double>(operand_type(graph, node, kK).dims[2].value());
  return {2.0 * keys * (3 * queries + 2 * outputs), traffic_bytes(graph, node)};
}

// The arrays of one problem in doubles. dq, dk and dv are sums over what reads their operand.
struct Problem {
  int64_t heads, groups, rows, keys, depth, width;
  double scale;
  bool causal, bool_mask;
  int64_t last;  // keys behind it are not seen
  std::vector<double> q, k, v, mask, y, lse, dy, dq, dk, dv;
  std::vector<int64_t> mask_at;
};

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

void add_scaled(double* to, double by, const double* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += by * from[i];
}

// The share of key t in a query's row, from the row's log-sum-exp.
double share(const Problem& p, int64_t row, int64_t t, double product, double lse) {
  constexpr double kMinusInf = -std::numeric_limits<double>::infinity();
  if ((p.causal && t > row % p.rows) || t > p.last || lse == kMinusInf) return 0;
  double s = product * p.scale;
  if (!p.mask.empty()) {
    const double m = p.mask[static_cast<size_t>(p.mask_at[static_cast<size_t>(row * p.keys + t)])];
    if (p.bool_mask && m == 0) return 0;
    if (!p.bool_mask) s += m;
  }
  return std::exp(s - lse);
}

// `row` counts the queries of all batches and heads.
void add_row(Problem& p, int64_t row) {
  const int64_t head = row / p.rows % p.heads, batch = row / p.rows / p.heads;
  const int64_t group = batch * p.groups + head / (p.heads / p.groups);
  const double* dy = p.dy.data() + row * p.width;
  const double mean = dot(dy, p.y.data() + row * p.width, p.width);
  const double lse = p.lse[static_cast<size_t>(row)];
  for (int64_t t = 0; t < p.keys; ++t) {
    const int64_t key = (group * p.keys + t) * p.depth, value = (group * p.keys + t) * p.width;
    const double* q = p.q.data() + row * p.depth;
    const double w = share(p, row, t, dot(q, p.k.data() + key, p.depth), lse);
    if (w == 0) continue;
    const double ds = w * (dot(dy, p.v.data() + value, p.width) - mean) * p.scale;
    add_scaled(p.dq.data() + row * p.depth, ds, p.k.data() + key, p.depth);
    add_scaled(p.dk.data() + key, ds, q, p.depth);
    add_scaled(p.dv.data() + value, w, dy, p.width);
  }
}

std::vector<HostTensor> reference_sdpa_backward(const Node& node, const HostOperands& in,
                                                const Types& out) {
  const std::vector<int64_t> q = sizes(in[kQ]->type.dims), k = sizes(in[kK]->type.dims);
  Problem p{q[1], k[1], q[2], k[2], q[3], in[kV]->type.dims[3].value(), node.f("scale"),
            node.i_or("is_causal", 0) != 0, false, std::numeric_limits<int64_t>::max(),
            to_doubles(*in[kQ]), to_doubles(*in[kK]), to_doubles(*in[kV]), {},
            to_doubles(*in[kY]), to_doubles(*in[kLse]), to_doubles(*in[kDy]), {}, {}, {}, {}};
  if (in[kMask] != nullptr) {
    p.mask = to_doubles(*in[kMask]);
    p.bool_mask = in[kMask]->type.dtype == ir::DType::kBool;
    p.mask_at = broadcast_offsets(in[kMask]->type.dims, {q[0], q[1], q[2], k[2]});
  }
  if (in[kLast] != nullptr) p.last = static_cast<int64_t>(to_doubles(*in[kLast])[0]);
  p.dq.resize(p.q.size()), p.dk.resize(p.k.size()), p.dv.resize(p.v.size());
  for (int64_t row = 0; row < q[0] * q[1] * q[2]; ++row) add_row(p, row);
  return {from_doubles(out[0], p.dq), from_doubles(out[1], p.dk), from_doubles(out[2], p.dv)};
}

}  // namespace

extern const OpDef kSdpaBackward{"sdpa_backward",     3, 8, kContraction, infer_sdpa_backward,
                                 sdpa_backward_cost, reference_sdpa_backward};

}  // namespace rm::ops
