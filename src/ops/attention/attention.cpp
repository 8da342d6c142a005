// sdpa (grouped queries, bool or additive mask, causal top-left, up to a last key; the log-sum-exp of
// its rows where a gradient reads it) and rope.
#include <cmath>
#include <limits>

#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Dim;
using ir::Dims;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Types infer_sdpa(const Graph& graph, const Node& node) {
  const TensorType &q = operand_type(graph, node, 0), &k = operand_type(graph, node, 1),
                   &v = operand_type(graph, node, 2);
  for (const TensorType* t : {&q, &k, &v}) {
    check_rank(node, *t, 4, "query, key and value");
    check_dtype(node, *t, q.dtype, "query, key and value");
  }
  if (!ir::is_floating(q.dtype)) fail(node, "floating operands", q.str());
  node.f("scale");
  Dim batch = unify(node, unify(node, q.dims[0], k.dims[0], "batches"), v.dims[0], "batches");
  Dim groups = unify(node, k.dims[1], v.dims[1], "key and value heads");
  unify(node, k.dims[2], v.dims[2], "key and value lengths");
  unify(node, q.dims[3], k.dims[3], "query and key head sizes");
  if (q.dims[1].is_static() && groups.is_static() &&
      (groups.value() == 0 || q.dims[1].value() % groups.value() != 0)) {
    fail(node, "query heads that are a multiple of the key heads",
         q.dims[1].str() + " and " + groups.str());
  }
  if (present(node, 3)) {
    const TensorType& mask = operand_type(graph, node, 3);
    if (mask.dtype != ir::DType::kBool) check_dtype(node, mask, q.dtype, "an additive mask");
    check_broadcasts_to(node, mask.dims, {batch, q.dims[1], q.dims[2], k.dims[2]});
  }
  if (present(node, 4)) {
    const TensorType& last = operand_type(graph, node, 4);
    check_dtype(node, last, ir::DType::kI64, "the last key");
    check_rank(node, last, 1, "the last key");
    unify(node, last.dims[0], 1, "the last key and one position");
  }
  Types out{{q.dtype, {batch, q.dims[1], q.dims[2], v.dims[3]}}};
  if (node.i_or("lse", 0) != 0) {
    out.push_back({q.dtype == ir::DType::kF64 ? q.dtype : ir::DType::kF32,
                   {batch, q.dims[1], q.dims[2]}});
  }
  return out;
}

Cost sdpa_cost(const Graph& graph, const Node& node) {
  auto queries = static_cast<double>(operand_type(graph, node, 0).num_elements());
  auto outputs = static_cast<double>(result_type(graph, node).num_elements());
  auto keys = static_cast<double>(operand_type(graph, node, 1).dims[2].value());
  return {2.0 * keys * (queries + outputs), traffic_bytes(graph, node)};
}

struct Problem {
  int64_t heads, groups, rows, keys, depth, width;
  double scale;
  bool causal, bool_mask;
  int64_t last;  // keys behind it are not seen
  std::vector<double> q, k, v, mask;
  std::vector<int64_t> mask_at;
};

// One query row: scores, softmax, weighted values into y[width]. Returns the scores' log-sum-exp.
double attend(const Problem& p, int64_t batch, int64_t head, int64_t row, double* y) {
  int64_t group = head / (p.heads / p.groups);
  const double* q = p.q.data() + ((batch * p.heads + head) * p.rows + row) * p.depth;
  const double* k = p.k.data() + (batch * p.groups + group) * p.keys * p.depth;
  const double* v = p.v.data() + (batch * p.groups + group) * p.keys * p.width;
  constexpr double kMinusInf = -std::numeric_limits<double>::infinity();
  std::vector<double> score(static_cast<size_t>(p.keys), 0);
  double high = kMinusInf, sum = 0;
  for (int64_t t = 0; t < p.keys; ++t) {
    double& s = score[static_cast<size_t>(t)];
    for (int64_t d = 0; d < p.depth; ++d) s += q[d] * k[t * p.depth + d];
    s *= p.scale;
    if ((p.causal && t > row) || t > p.last) s = kMinusInf;
    if (!p.mask.empty()) {
      auto at = static_cast<size_t>(((batch * p.heads + head) * p.rows + row) * p.keys + t);
      double m = p.mask[static_cast<size_t>(p.mask_at[at])];
      s = p.bool_mask ? (m != 0 ? s : kMinusInf) : s + m;
    }
    high = std::isnan(s) ? s : std::max(high, s);
  }
  std::fill(y, y + p.width, 0.0);
  if (high == kMinusInf) return high;  // every key masked: zeros, as torch has it
  for (double& s : score) sum += s = std::exp(s - high);
  for (int64_t t = 0; t < p.keys; ++t) {
    for (int64_t e = 0; e < p.width; ++e) {
      y[e] += score[static_cast<size_t>(t)] / sum * v[t * p.width + e];
    }
  }
  return high + std::log(sum);
}

std::vector<HostTensor> reference_sdpa(const Node& node, const HostOperands& in, const Types& out) {
  std::vector<int64_t> q = sizes(in[0]->type.dims), k = sizes(in[1]->type.dims);
  Problem p{q[1],
            k[1],
            q[2],
            k[2],
            q[3],
            in[2]->type.dims[3].value(),
            node.f("scale"),
            node.i_or("is_causal", 0) != 0,
            false,
            std::numeric_limits<int64_t>::max(),
            to_doubles(*in[0]),
            to_doubles(*in[1]),
            to_doubles(*in[2]),
            {},
            {}};
  if (in.size() > 3 && in[3] != nullptr) {
    p.mask = to_doubles(*in[3]);
    p.bool_mask = in[3]->type.dtype == ir::DType::kBool;
    p.mask_at = broadcast_offsets(in[3]->type.dims, {q[0], q[1], q[2], k[2]});
  }
  if (in.size() > 4 && in[4] != nullptr) p.last = static_cast<int64_t>(to_doubles(*in[4])[0]);
  std::vector<double> y(static_cast<size_t>(out[0].num_elements())), lse;
  double* to = y.data();
  for (int64_t b = 0; b < q[0]; ++b) {
    for (int64_t h = 0; h < p.heads; ++h) {
      for (int64_t s = 0; s < p.rows; ++s, to += p.width) lse.push_back(attend(p, b, h, s, to));
    }
  }
  std::vector<HostTensor> results{from_doubles(out[0], y)};
  if (out.size() > 1) results.push_back(from_doubles(out[1], lse));
  return results;
}

Types infer_rope(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, 0);
  check_rank(node, x, 4, "an operand");
  for (size_t i : {size_t{1}, size_t{2}}) {
    check_dtype(node, operand_type(graph, node, i), x.dtype, "cos and sin");
    check_broadcasts_to(node, operand_type(graph, node, i).dims, x.dims);
  }
  const Dim& d = x.dims.back();
  if (d.is_static() && d.value() % 2 != 0) fail(node, "an even head size", d.str());
  return {x};
}

Cost rope_cost(const Graph& graph, const Node& node) {
  return {3.0 * static_cast<double>(result_type(graph, node).num_elements()),
          traffic_bytes(graph, node)};
}

std::vector<HostTensor> reference_rope(const Node& node, const HostOperands& in, const Types& out) {
  int64_t d = out[0].dims.back().value(), half = d / 2;
  bool interleaved = node.i_or("interleaved", 0) != 0;
  std::vector<double> x = to_doubles(*in[0]), cos = to_doubles(*in[1]), sin = to_doubles(*in[2]);
  std::vector<int64_t> at_cos = broadcast_offsets(in[1]->type.dims, out[0].dims);
  std::vector<int64_t> at_sin = broadcast_offsets(in[2]->type.dims, out[0].dims);
  std::vector<double> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    int64_t j = static_cast<int64_t>(i) % d;
    size_t row = i - static_cast<size_t>(j);
    bool first = interleaved ? j % 2 == 0 : j < half;
    int64_t partner = interleaved ? (first ? j + 1 : j - 1) : (first ? j + half : j - half);
    double rotated = (first ? -1.0 : 1.0) * x[row + static_cast<size_t>(partner)];
    y[i] =
        x[i] * cos[static_cast<size_t>(at_cos[i])] + rotated * sin[static_cast<size_t>(at_sin[i])];
  }
  return {from_doubles(out[0], y)};
}

}  // namespace

extern const OpDef kSdpa{"sdpa", 3, 5, kContraction, infer_sdpa, sdpa_cost, reference_sdpa};
extern const OpDef kRope{"rope", 3, 3, kNone, infer_rope, rope_cost, reference_rope};

}  // namespace rm::ops
