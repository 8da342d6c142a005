// Comparisons of ranges that are decided by their bounds, and lookups by ranges, which are views.
// Mask building in exported language models is made of these.
#include <algorithm>

#include "passes/dim_bounds.hpp"
#include "passes/iota_form.hpp"
#include "passes/rules/rules.hpp"
#include "passes/value_bounds.hpp"

namespace rm::passes {
namespace {

using ir::Dim;
using ir::Dims;
using ir::Node;
using ir::ValueId;

// a <= b for all pairs of elements (also a < b when `gap` is 1).
bool always_below(const Rewriter& rw, const IotaRange& a, const IotaRange& b, int64_t gap) {
  return provably_nonnegative(b.lo - a.hi - Dim(gap), rw.graph());
}

// 1: always true, 0: always false, -1: not known.
int decide(const Rewriter& rw, std::string_view op, const IotaRange& a, const IotaRange& b) {
  if (op == "ge") return decide(rw, "le", b, a);
  if (op == "gt") return decide(rw, "lt", b, a);
  if (op == "le" || op == "lt") {
    int64_t gap = op == "lt" ? 1 : 0;
    if (always_below(rw, a, b, gap)) return 1;
    return always_below(rw, b, a, 1 - gap) ? 0 : -1;
  }
  if (op != "eq" && op != "ne") return -1;
  if (always_below(rw, a, b, 1) || always_below(rw, b, a, 1)) return op == "ne" ? 1 : 0;
  bool one_value = a.lo == a.hi && b.lo == b.hi && a.lo == b.lo;
  return one_value ? (op == "eq" ? 1 : 0) : -1;
}

// One axis of an indexed operand: `size` elements from `start`, laid along `axis` of the result
// of the index operands (-1: a single element).
struct Lookup {
  Dim start, size;
  int axis;
  int64_t operand_axis;
};

std::optional<Lookup> lookup(const Rewriter& rw, ValueId index, int64_t operand_axis, size_t rank) {
  std::optional<IotaForm> form = iota_form(rw, index);
  if (!form || !provably_nonnegative(range(*form, rw.dims(index)).lo, rw.graph()))
    return std::nullopt;
  if (form->axis < 0) return Lookup{form->start, 1, -1, operand_axis};
  if (form->step != 1) return std::nullopt;
  const Dims& dims = rw.dims(index);
  return Lookup{form->start, dims[static_cast<size_t>(form->axis)],
                form->axis + static_cast<int>(rank - dims.size()), operand_axis};
}

// The same for numbers.
int decide(std::string_view op, const DimBounds& a, const DimBounds& b) {
  if (op == "ge") return decide("le", b, a);
  if (op == "gt") return decide("lt", b, a);
  if (op == "le") return a.hi <= b.lo ? 1 : a.lo > b.hi ? 0 : -1;
  if (op == "lt") return a.hi < b.lo ? 1 : a.lo >= b.hi ? 0 : -1;
  if (op != "eq" && op != "ne") return -1;
  if (a.hi < b.lo || b.hi < a.lo) return op == "ne" ? 1 : 0;
  const bool one_value = a.lo == a.hi && b.lo == b.hi;
  return one_value ? (op == "eq" ? 1 : 0) : -1;
}

}  // namespace

bool compare_ranges(Rewriter& rw, const Node& node) {
  if (node.operands.size() != 2 || rw.dtype(node.result()) != ir::DType::kBool) return false;
  std::optional<IotaForm> a = iota_form(rw, node.operands[0]);
  if (!a) return false;
  std::optional<IotaForm> b = iota_form(rw, node.operands[1]);
  if (!b) return false;
  int known = decide(rw, node.op, range(*a, rw.dims(node.operands[0])),
                     range(*b, rw.dims(node.operands[1])));
  if (known < 0) return false;
  return rw.replace(node.result(), rw.emit("full", {}, {{"value", static_cast<int64_t>(known)}},
                                           rw.type(node.result())));
}

// Whether classes and positions are within bounds, where their makers say so: what argmax or topk
// gives, what was clamped.
bool compare_bounds(Rewriter& rw, const Node& node) {
  if (node.operands.size() != 2 || rw.dtype(node.result()) != ir::DType::kBool) return false;
  const std::optional<DimBounds> a = value_bounds(rw, node.operands[0]);
  if (!a) return false;
  const std::optional<DimBounds> b = value_bounds(rw, node.operands[1]);
  if (!b) return false;
  const int known = decide(node.op, *a, *b);
  if (known < 0) return false;
  return rw.replace(node.result(), rw.emit("full", {}, {{"value", static_cast<int64_t>(known)}},
                                           rw.type(node.result())));
}

bool all_of_constant(Rewriter& rw, const Node& node) {
  if (node.op != "reduce" || node.s("kind") != "all") return false;
  const std::optional<double> value = rw.splat(node.operands[0]);
  if (!value || *value == 0) return false;
  return rw.replace(node.result(), rw.emit("full", {}, {{"value", int64_t{1}}}, rw.type(node.result())));
}

// x[arange(b)[:, None], arange(t)[None, :]] is a slice of x, reshaped and expanded. Where the range
// leaves x, both are errors: the slice is refused once sizes are known.
bool index_by_ranges_is_view(Rewriter& rw, const Node& node) {
  if (node.op != "index") return false;
  const auto& axes = node.ints("axes");
  const Dims out = rw.dims(node.result());  // a copy: emitting moves values
  ValueId x = node.operands[0];
  size_t first = static_cast<size_t>(axes[0]), count = axes.size();
  size_t shared_rank = out.size() + count - rw.dims(x).size();
  std::vector<Lookup> lookups;
  std::vector<char> taken(shared_rank, 0);
  for (size_t k = 0; k < count; ++k) {
    std::optional<Lookup> found = lookup(rw, node.operands[k + 1], axes[k], shared_rank);
    if (!found || (found->axis >= 0 && taken[static_cast<size_t>(found->axis)]++ != 0))
      return false;
    lookups.push_back(*found);
  }
  for (const Lookup& l : lookups) {
    ir::TensorType sliced = rw.type(x);
    auto axis = static_cast<size_t>(l.operand_axis);
    if (sliced.dims[axis] == l.size && l.start == Dim(0)) continue;
    sliced.dims[axis] = l.size;
    x = rw.emit("slice", {x},
                {{"axis", l.operand_axis},
                 {"start", Dims{l.start}},
                 {"step", int64_t{1}},
                 {"stop", Dims{l.start + l.size}}},
                sliced);
  }
  // Indexed axes in the order in which the result has them; single elements go first.
  std::stable_sort(lookups.begin(), lookups.end(),
                   [](const Lookup& a, const Lookup& b) { return a.axis < b.axis; });
  ir::TensorType moved = rw.type(x);
  std::vector<int64_t> order;
  for (size_t d = 0; d < moved.rank(); ++d) {
    bool indexed = d >= first && d < first + count;
    order.push_back(indexed ? lookups[d - first].operand_axis : static_cast<int64_t>(d));
    moved.dims[d] = rw.dims(x)[static_cast<size_t>(order.back())];
  }
  if (!std::is_sorted(order.begin(), order.end()))
    x = rw.emit("permute", {x}, {{"axes", order}}, moved);
  Dims narrow = out;
  for (size_t d = 0; d < shared_rank; ++d) narrow[first + d] = 1;
  for (const Lookup& l : lookups) {
    if (l.axis >= 0) narrow[first + static_cast<size_t>(l.axis)] = l.size;
  }
  x = rw.reshape(x, narrow);
  if (narrow != out) x = rw.emit("expand", {x}, {{"shape", out}}, rw.type(node.result()));
  return rw.replace(node.result(), x);
}

// iota + constant and a slice of an iota are an iota; sums of sizes are a size.
bool sum_of_iota_is_iota(Rewriter& rw, const Node& node) {
  if (node.op != "add" && node.op != "sub" && node.op != "slice") return false;
  const ir::TensorType& type = rw.type(node.result());
  if (type.rank() > 1) return false;
  std::optional<IotaForm> form = iota_form(rw, node);
  if (!form) return false;
  if (type.rank() == 0) {
    if (type.dtype != ir::DType::kI64) return false;
    return rw.replace(node.result(),
                      rw.emit("dim_value", {}, {{"value", Dims{form->start}}}, type));
  }
  if (form->axis < 0 && type.dims[0] != Dim(1)) return false;
  int64_t step = form->axis < 0 ? 1 : form->step;
  return rw.replace(node.result(),
                    rw.emit("iota", {}, {{"start", Dims{form->start}}, {"step", step}}, type));
}

// Every partial sum of zeros is zero.
bool cumsum_of_zeros_is_zero(Rewriter& rw, const Node& node) {
  if (node.op != "cumsum" || !rw.splat(node.operands[0]) || !rw.is_splat(node.operands[0], 0.0))
    return false;
  ir::Attr zero = int64_t{0};
  if (ir::is_floating(rw.dtype(node.result()))) zero = 0.0;
  return rw.replace(node.result(), rw.emit("full", {}, {{"value", zero}}, rw.type(node.result())));
}

}  // namespace rm::passes
