// Views, concat, reductions and running sums.
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
  auto zeros = [&](int64_t n, Dims like) {
    like[axis] = Dim(n);
    return b.full({b.dtype(dy), std::move(like)}, 0);
  };
  if (count == 0) {
    a.din[0] = b.zeros_like(a.x());
    return;
  }
  int64_t end = start + count;
  if (step > 1) {  // each element followed by step - 1 zeros
    Dims wide = b.dims(dy);
    wide.insert(wide.begin() + static_cast<std::ptrdiff_t>(axis) + 1, Dim(1));
    ValueId column = b.reshape(dy, wide);
    wide[axis + 1] = Dim(step - 1);
    ValueId gaps = b.full({b.dtype(dy), wide}, 0);
    ValueId both = b.op("concat", {column, gaps}, {{"axis", static_cast<int64_t>(axis) + 1}});
    Dims flat = b.dims(dy);
    flat[axis] = Dim(count * step);
    dy = b.reshape(both, flat);
    end = start + count * step;
    if (end > total) {
      dy = b.slice(dy, axis, 0, total - start);
      end = total;
    }
  }
  std::vector<ValueId> parts;
  if (start > 0) parts.push_back(zeros(start, b.dims(dy)));
  parts.push_back(dy);
  if (end < total) parts.push_back(zeros(total - end, b.dims(dy)));
  a.din[0] = parts.size() == 1
                 ? dy
                 : b.op("concat", std::move(parts), {{"axis", static_cast<int64_t>(axis)}});
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
  return {{"reshape", reshape}, {"permute", permute}, {"expand", expand}, {"slice", slice},
          {"concat", concat},   {"reduce", reduce},   {"cumsum", cumsum}, {"iota", nullptr},
          {"full", nullptr},    {"dim_value", nullptr}, {"uniform", nullptr}};
}

}  // namespace rm::autograd
