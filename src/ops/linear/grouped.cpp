// grouped_gemm: rows in groups, each group times a matrix of its own. Where groups end is a value.
#include <algorithm>

#include "base/error.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Types infer_grouped(const Graph& graph, const Node& node) {
  const TensorType &x = operand_type(graph, node, 0), &w = operand_type(graph, node, 1),
                   &offsets = operand_type(graph, node, 2);
  check_rank(node, x, 2, "rows");
  check_rank(node, w, 3, "matrices");
  check_rank(node, offsets, 1, "offsets");
  check_dtype(node, w, x.dtype, "both operands");
  if (offsets.dtype != ir::DType::kI64 && offsets.dtype != ir::DType::kI32) {
    fail(node, "i64 or i32 offsets", offsets.str() + "; try a cast");
  }
  unify(node, x.dims[1], w.dims[1], "inner sizes");
  unify(node, offsets.dims[0], w.dims[0], "offsets and matrices");
  return {{x.dtype, {x.dims[0], w.dims[2]}}};
}

// Only matrices of groups that have rows are read.
Cost grouped_cost(const Graph& graph, const Node& node) {
  const TensorType &x = operand_type(graph, node, 0), &w = operand_type(graph, node, 1);
  const auto rows = static_cast<double>(x.dims[0].value()), k = static_cast<double>(x.dims[1].value());
  const auto groups = static_cast<double>(w.dims[0].value()), n = static_cast<double>(w.dims[2].value());
  const auto item = static_cast<double>(ir::size_bytes(x.dtype));
  return {2.0 * rows * k * n, item * (rows * (k + n) + std::min(groups, rows) * k * n)};
}

std::vector<HostTensor> reference_grouped(const Node& node, const HostOperands& in,
                                          const Types& out) {
  const std::vector<double> x = to_doubles(*in[0]), w = to_doubles(*in[1]);
  const std::vector<int64_t> ends = to_ints(*in[2]);
  const auto rows = out[0].dims[0].value(), n = out[0].dims[1].value();
  const int64_t k = in[0]->type.dims[1].value();
  std::vector<double> y(static_cast<size_t>(rows * n), 0.0);
  int64_t begin = 0;
  for (size_t e = 0; e < ends.size(); ++e) {
    if (ends[e] < begin || ends[e] > rows) {
      throw Error(RM_OUT_OF_RANGE, "[" + node.op + "] expected offsets that do not fall and end in [0, " +
                                       std::to_string(rows) + "], got " + std::to_string(ends[e]));
    }
    const double* matrix = w.data() + static_cast<int64_t>(e) * k * n;
    for (int64_t i = begin; i < ends[e]; ++i) {
      for (int64_t p = 0; p < k; ++p) {
        const double factor = x[static_cast<size_t>(i * k + p)];
        for (int64_t j = 0; j < n; ++j) y[static_cast<size_t>(i * n + j)] += factor * matrix[p * n + j];
      }
    }
    begin = ends[e];
  }
  return {from_doubles(out[0], y)};
}

}  // namespace

extern const OpDef kGroupedGemm{"grouped_gemm", 3,           3,
                                kContraction,   infer_grouped, grouped_cost,
                                reference_grouped};

}  // namespace rm::ops
