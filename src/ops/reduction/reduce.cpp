// reduce and cumsum. Sums run in double; integers in 64 bits.
#include <algorithm>
#include <cmath>
#include <limits>

#include "ir/scalar.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Dims;
using ir::DType;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

constexpr const char* kKinds = "sum, mean, max, min, prod, any, all, argmax or argmin";

DType reduced_dtype(const Node& node, DType x) {
  const std::string& kind = node.s("kind");
  if (kind == "any" || kind == "all") return DType::kBool;
  if (kind == "argmax" || kind == "argmin") return DType::kI64;
  if (kind == "max" || kind == "min") return x;
  if (kind == "sum" || kind == "prod") return ir::is_floating(x) ? x : DType::kI64;
  if (kind == "mean") {
    if (!ir::is_floating(x)) fail(node, "floating operands for a mean", std::string(ir::name(x)));
    return x;
  }
  fail(node, std::string("kind ") + kKinds, "'" + kind + "'");
}

std::vector<char> reduced_axes(const Node& node, size_t rank) {
  std::vector<char> reduced(rank, 0);
  for (int64_t a : node.ints("axes")) {
    if (a < 0 || a >= static_cast<int64_t>(rank)) {
      fail(node, "axes below " + std::to_string(rank), std::to_string(a));
    }
    reduced[static_cast<size_t>(a)] = 1;
  }
  return reduced;
}

Types infer_reduce(const Graph& graph, const Node& node) {
  const TensorType& x = operand_type(graph, node, 0);
  std::vector<char> reduced = reduced_axes(node, x.rank());
  bool keep = node.i_or("keepdim", 0) != 0;
  TensorType out{reduced_dtype(node, x.dtype), {}};
  for (size_t d = 0; d < x.rank(); ++d) {
    if (reduced[d] == 0) out.dims.push_back(x.dims[d]);
    if (reduced[d] != 0 && keep) out.dims.emplace_back(1);
  }
  return {out};
}

Cost reduce_cost(const Graph& graph, const Node& node) {
  return {static_cast<double>(operand_type(graph, node, 0).num_elements()),
          traffic_bytes(graph, node)};
}

double reduce_floats(const std::string& kind, const std::vector<double>& v) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  double sum = 0, product = 1, high = -kInf, low = kInf;
  bool any = false, all = true, nan = false;
  for (double x : v) {
    sum += x;
    product *= x;
    nan = nan || std::isnan(x);
    high = std::max(high, x);
    low = std::min(low, x);
    any = any || x != 0;
    all = all && x != 0;
  }
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  if (kind == "sum") return sum;
  if (kind == "prod") return product;
  if (kind == "mean") return v.empty() ? kNaN : sum / static_cast<double>(v.size());
  if (kind == "max") return nan ? kNaN : high;
  if (kind == "min") return nan ? kNaN : low;
  return static_cast<double>(kind == "any" ? any : all);
}

int64_t reduce_ints(const std::string& kind, const std::vector<int64_t>& v) {
  uint64_t sum = 0, product = 1;
  int64_t high = INT64_MIN, low = INT64_MAX;
  bool any = false, all = true;
  for (int64_t x : v) {
    sum += static_cast<uint64_t>(x);
    product *= static_cast<uint64_t>(x);
    high = std::max(high, x);
    low = std::min(low, x);
    any = any || x != 0;
    all = all && x != 0;
  }
  if (kind == "sum") return static_cast<int64_t>(sum);
  if (kind == "prod") return static_cast<int64_t>(product);
  if (kind == "max") return high;
  if (kind == "min") return low;
  return static_cast<int64_t>(kind == "any" ? any : all);
}

// First position of the extreme value; a NaN is the extreme, as in torch.
int64_t arg_extreme(const std::vector<double>& v, bool want_max) {
  size_t best = 0;
  for (size_t i = 1; i < v.size(); ++i) {
    if (std::isnan(v[best])) break;
    if (std::isnan(v[i]) || (want_max ? v[i] > v[best] : v[i] < v[best])) best = i;
  }
  return static_cast<int64_t>(best);
}

std::vector<HostTensor> reference_reduce(const Node& node, const HostOperands& in,
                                         const Types& out) {
  const HostTensor& x = *in[0];
  std::vector<char> reduced = reduced_axes(node, x.type.rank());
  std::vector<int64_t> shape = sizes(x.type.dims), strides = contiguous_strides(shape);
  std::vector<int64_t> kept, kept_strides, gone, gone_strides;
  for (size_t d = 0; d < shape.size(); ++d) {
    (reduced[d] != 0 ? gone : kept).push_back(shape[d]);
    (reduced[d] != 0 ? gone_strides : kept_strides).push_back(strides[d]);
  }
  const std::string& kind = node.s("kind");
  bool arg = kind == "argmax" || kind == "argmin";
  bool floats = ir::is_floating(x.type.dtype);
  std::vector<int64_t> starts = strided_offsets(kept, kept_strides);
  std::vector<int64_t> inner = strided_offsets(gone, gone_strides);
  HostTensor y = zeros(out[0]);
  for (size_t i = 0; i < starts.size(); ++i) {
    std::vector<double> values;
    std::vector<int64_t> ints;
    for (int64_t o : inner) {
      values.push_back(ir::load_element(x.type.dtype, x.at(starts[i] + o)));
      if (!floats) ints.push_back(ir::load_int(x.type.dtype, x.at(starts[i] + o)));
    }
    char* to = y.at(static_cast<int64_t>(i));
    if (arg) {
      ir::store_int(out[0].dtype, to, arg_extreme(values, kind == "argmax"));
    } else if (floats) {
      ir::store_element(out[0].dtype, to, reduce_floats(kind, values));
    } else {
      ir::store_int(out[0].dtype, to, reduce_ints(kind, ints));
    }
  }
  return {y};
}

Types infer_cumsum(const Graph& graph, const Node& node) {
  TensorType out = operand_type(graph, node, 0);
  axis_of(node, out.rank());
  if (!ir::is_floating(out.dtype)) out.dtype = DType::kI64;
  return {out};
}

std::vector<HostTensor> reference_cumsum(const Node& node, const HostOperands& in,
                                         const Types& out) {
  AxisSplit s = split_at(out[0].dims, axis_of(node, out[0].rank()));
  bool floats = ir::is_floating(out[0].dtype);
  HostTensor y = zeros(out[0]);
  for (int64_t o = 0; o < s.outer; ++o) {
    for (int64_t i = 0; i < s.inner; ++i) {
      double sum = 0;
      uint64_t total = 0;
      for (int64_t k = 0; k < s.size; ++k) {
        int64_t at = (o * s.size + k) * s.inner + i;
        sum += ir::load_element(in[0]->type.dtype, in[0]->at(at));
        total += static_cast<uint64_t>(ir::load_int(in[0]->type.dtype, in[0]->at(at)));
        if (floats) ir::store_element(out[0].dtype, y.at(at), sum);
        if (!floats) ir::store_int(out[0].dtype, y.at(at), static_cast<int64_t>(total));
      }
    }
  }
  return {y};
}

}  // namespace

extern const OpDef kReduce{"reduce", 1, 1, kReduction, infer_reduce, reduce_cost, reference_reduce};
extern const OpDef kCumsum{"cumsum", 1, 1, kReduction, infer_cumsum, reduce_cost, reference_cumsum};

}  // namespace rm::ops
