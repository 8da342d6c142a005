// Appends typed nodes to a static graph: what gradients and optimiser updates are written with.
//
// Types are inferred by the operators' own records. Operands of the arithmetic functions have one
// element type and broadcast as in docs/operators.md.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ir/graph.hpp"

namespace rm::autograd {

using ir::ValueId;
using Ints = std::vector<int64_t>;

/// Operators of gradients that the program's device has kernels for. Rules write gradients with
/// others where there are none.
using Served = std::set<std::string, std::less<>>;

// Types and dims come by value: appending a node moves those that the graph holds.
class Builder {
 public:
  explicit Builder(ir::Graph& graph, Served served = {})
      : graph_(graph), served_(std::move(served)) {}

  bool serves(std::string_view op) const { return served_.find(op) != served_.end(); }
  /// One more result of the node that computes `v`: what an attribute asks its record to give.
  /// The same one when it was asked for before.
  ValueId saved(ValueId v, const std::string& attr);

  ir::Graph& graph() { return graph_; }
  const ir::Graph& graph() const { return graph_; }
  ir::TensorType type(ValueId v) const { return graph_.type(v); }
  ir::Dims dims(ValueId v) const { return graph_.type(v).dims; }
  ir::DType dtype(ValueId v) const { return graph_.type(v).dtype; }
  int64_t size(ValueId v, size_t axis) const { return dims(v)[axis].value(); }
  size_t rank(ValueId v) const { return dims(v).size(); }

  /// A node whose result types its record infers. Returns the first result.
  ValueId op(std::string name, std::vector<ValueId> operands, ir::Attrs attrs = {});
  /// All results of such a node.
  std::vector<ValueId> ops(std::string name, std::vector<ValueId> operands, ir::Attrs attrs = {});
  /// The same for operators whose result type is written on the node: full, cast, iota.
  ValueId typed(std::string name, std::vector<ValueId> operands, ir::Attrs attrs,
                ir::TensorType type);

  ValueId scalar(ir::DType dtype, double value);
  /// A scalar of the element type of `like`.
  ValueId number(ValueId like, double value) { return scalar(dtype(like), value); }
  ValueId full(ir::TensorType type, double value);
  ValueId zeros_like(ValueId v) { return full(type(v), 0); }
  ValueId iota(int64_t size, ir::DType dtype = ir::DType::kI64);

  ValueId add(ValueId a, ValueId b) { return op("add", {a, b}); }
  ValueId sub(ValueId a, ValueId b) { return op("sub", {a, b}); }
  ValueId mul(ValueId a, ValueId b) { return op("mul", {a, b}); }
  // Numbers have functions of their own: an integer literal would be taken for a value's id.
  ValueId scaled(ValueId a, double b) { return op("mul", {a, number(a, b)}); }
  ValueId plus(ValueId a, double b) { return op("add", {a, number(a, b)}); }
  ValueId add(ValueId a, double b) = delete;
  ValueId mul(ValueId a, double b) = delete;
  ValueId div(ValueId a, ValueId b) { return op("div", {a, b}); }
  ValueId neg(ValueId a) { return op("neg", {a}); }
  ValueId where(ValueId c, ValueId a, ValueId b) { return op("where", {c, a, b}); }
  /// `a` where `c`, else 0.
  ValueId keep_where(ValueId c, ValueId a) { return where(c, a, number(a, 0)); }

  ValueId cast(ValueId v, ir::DType to);
  ValueId reshape(ValueId v, ir::Dims dims);
  ValueId permute(ValueId v, Ints axes);
  /// The last two axes exchanged.
  ValueId transpose(ValueId v);
  ValueId expand(ValueId v, ir::Dims dims);
  ValueId slice(ValueId v, size_t axis, int64_t start, int64_t stop, int64_t step = 1);
  /// `before` and `after` elements of `fill` around `v` along one axis; fewer than 0 take some away.
  ValueId frame(ValueId v, size_t axis, int64_t before, int64_t after, double fill = 0);
  /// Each element followed by `step` - 1 zeros along one axis.
  ValueId spread(ValueId v, size_t axis, int64_t step);
  ValueId reduce(std::string kind, ValueId v, Ints axes, bool keepdim);
  /// Sums what broadcasting `dims` to the shape of `v` repeated: the transpose of expand.
  ValueId sum_to(ValueId v, const ir::Dims& dims);
  ValueId matmul(ValueId a, ValueId b) { return op("matmul", {a, b}); }

 private:
  ir::Graph& graph_;
  Served served_;
  std::map<std::pair<ir::DType, double>, ValueId> scalars_;
};

/// 0 .. n-1.
Ints all_axes(size_t n);

}  // namespace rm::autograd
