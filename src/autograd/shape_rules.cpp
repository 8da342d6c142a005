// Views, concat, reductions and running sums.
#include <algorithm>

#include "autograd/rules.hpp"
#include "base/error.hpp"

namespace rm::autograd {
namespace {

using ir::Dim;
using ir::Dims;

void reshape(Adjoint& a) { a.din[0] = a.b.reshape(a.dy(), a.b.dims(a.x())); }

void permute(Adjoint& a) {
  const Ints& axes = a.node.ints("axes");
  Ints inverse(axes.size());
  for (size_t i = 0; i < axes.size(); ++i) {
    inverse[static_cast<size_t>(axes[i])] = static_cast<int64_t>(i);
  }
  a.din[0] = a.b.permute(a.dy(), std::move(inverse));
}

void expand(Adjoint& a) { a.give(0, a.dy()); }

// Zeros before, between and behind.
void slice(Adjoint& a) {
  Builder& b = a.b;
  const auto axis = static_cast<size_t>(a.node.i("axis"));
  const int64_t step = a.node.i("step"), total = b.size(a.x(), axis);
  const int64_t start = a.node.dims("start")[0].value();
  ValueId dy = a.dy();
  const int64_t count = b.size(dy, axis);
  if (count == 0) {
    a.din[0] = b.zeros_like(a.x());
    return;
  }
  if (step > 1) {
    dy = b.spread(dy, axis, step);
    dy = b.slice(dy, axis, 0, std::min(b.size(dy, axis), total - start));
  }
  a.din[0] = b.frame(dy, axis, start, total - start - b.size(dy, axis));
}

void concat(Adjoint& a) {
  const auto axis = static_cast<size_t>(a.node.i("axis"));
  int64_t at = 0;
  for (size_t i = 0; i < a.node.operands.size(); ++i) {
    const int64_t size = a.b.size(a.x(i), axis);
    if (a.wants(i)) a.din[i] = a.b.slice(a.dy(), axis, at, at + size);
    at += size;
  }
}

// `v` with the reduced axes back as size 1.
ValueId kept(Adjoint& a, ValueId v) {
  Dims dims = a.b.dims(a.x());
  for (int64_t axis : a.node.ints("axes")) dims[static_cast<size_t>(axis)] = Dim(1);
  return a.b.reshape(v, std::move(dims));
}

// The product of the others: y / x, and where one factor is 0 the product of the rest.
ValueId others(Adjoint& a, ValueId y) {
  Builder& b = a.b;
  const Ints& axes = a.node.ints("axes");
  const ValueId zero = b.number(y, 0), one = b.number(y, 1);
  ValueId is_zero = b.op("eq", {a.x(), zero});
  ValueId count = b.reduce("sum", b.cast(is_zero, b.dtype(y)), axes, true);
  ValueId rest = b.reduce("prod", b.where(is_zero, one, a.x()), axes, true);
  ValueId alone = b.op("and", {is_zero, b.op("eq", {count, one})});
  ValueId regular = b.where(b.op("eq", {count, zero}), b.div(y, a.x()), zero);
  return b.where(alone, rest, regular);
}

void reduce(Adjoint& a) {
  Builder& b = a.b;
  const std::string& kind = a.node.s("kind");
  const Dims dims = b.dims(a.x());
  ValueId dy = kept(a, a.dy());
  if (kind == "sum") {
    a.din[0] = b.expand(dy, dims);
  } else if (kind == "mean") {
    double count = 1;
    for (int64_t axis : a.node.ints("axes")) {
      count *= static_cast<double>(dims[static_cast<size_t>(axis)].value());
    }
    a.din[0] = b.expand(b.scaled(dy, 1 / count), dims);
  } else if (kind == "max" || kind == "min") {  // equals share, as torch's amax does
    ValueId hit = b.cast(b.op("eq", {a.x(), kept(a, a.y())}), b.dtype(dy));
    ValueId count = b.reduce("sum", hit, a.node.ints("axes"), true);
    a.din[0] = b.mul(hit, b.div(dy, count));
  } else if (kind == "prod") {
    a.din[0] = b.mul(dy, others(a, kept(a, a.y())));
  } else {
    throw Error(RM_UNIMPLEMENTED,
                "[autograd] expected a reduction with a gradient, got '" + kind + "'", "RM702");
  }
}

// Every element is in its own sum and all later ones: the sum from behind.
void cumsum(Adjoint& a) {
  const auto axis = static_cast<int64_t>(a.node.i("axis"));
  ValueId total = a.b.reduce("sum", a.dy(), {axis}, true);
  ValueId before = a.b.op("cumsum", {a.dy()}, {{"axis", axis}});
  a.din[0] = a.b.add(a.b.sub(total, before), a.dy());
}

}  // namespace

std::vector<NamedRule> shape_rules() {
  constexpr std::string_view kAlone = "it has no operand";
  return {{"reshape", reshape}, {"permute", permute}, {"expand", expand}, {"slice", slice},
          {"concat", concat},   {"reduce", reduce},   {"cumsum", cumsum},
          {"grouped_gemm", nullptr, "the slope of a matrix of a group is a product over that group alone"},
          {"scan", nullptr, "running products and extremes are not differentiated"},
          {"iota", nullptr, kAlone}, {"full", nullptr, kAlone}, {"dim_value", nullptr, kAlone},
          {"uniform", nullptr, "its operand is an integer state"},
          {"check", nullptr, "its operand is a truth"},
          {"bitcast", nullptr, "bits have no slope"}};
}

}  // namespace rm::autograd
