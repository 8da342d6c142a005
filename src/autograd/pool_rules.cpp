// Pools. The gradient of a largest element goes to the first of the equal ones, as torch's does; that
// of a mean is spread over its window.
//
// Windows that do not overlap need no sum: their gradients are written where they belong. Others are
// added up, by a scatter for the largest and by a pool over the gradients for the mean.
#include <algorithm>
#include <limits>

#include "autograd/rules.hpp"
#include "base/error.hpp"
#include "ops/vision/windows.hpp"

namespace rm::autograd {
namespace {

using ir::Dim;
using ir::Dims;

// A step compares each element of a window once: larger windows are left to torch.
constexpr int64_t kMostPlaces = 1024;

struct Pool {
  ops::Windows w;
  Ints kernel;
  Ints size, count;  // spatial sizes of the operand and of the result
  Ints reach;        // rows from the first element of the first window to the last of the last
  int64_t places = 1;  // of a window
  bool disjoint = true;

  size_t axes() const { return kernel.size(); }
};

Pool pool_of(Adjoint& a) {
  Pool p;
  p.kernel = a.node.ints("kernel");
  p.w = ops::windows_of(a.node, p.axes());
  for (size_t i = 0; i < p.axes(); ++i) {
    p.size.push_back(a.b.size(a.x(), i + 2));
    p.count.push_back(a.b.size(a.y(), i + 2));
    p.reach.push_back((p.count[i] - 1) * p.w.stride[i] + p.w.dilation[i] * (p.kernel[i] - 1) + 1);
    p.places *= p.kernel[i];
    p.disjoint = p.disjoint && p.kernel[i] == p.w.stride[i] && p.w.dilation[i] == 1;
  }
  return p;
}

// The part of the padded operand that windows reach.
ValueId reached(Builder& b, const Pool& p, ValueId x, double fill) {
  for (size_t i = 0; i < p.axes(); ++i) {
    x = b.frame(x, i + 2, p.w.begin[i], p.reach[i] - p.size[i] - p.w.begin[i], fill);
  }
  return x;
}

// Its gradient as that of the operand.
ValueId unreached(Builder& b, const Pool& p, ValueId dx) {
  for (size_t i = 0; i < p.axes(); ++i) {
    dx = b.frame(dx, i + 2, -p.w.begin[i], p.size[i] + p.w.begin[i] - p.reach[i]);
  }
  return dx;
}

// [N,C,O1,O2] -> [N,C,O1,1,O2,1], or with the sizes of a window in place of 1.
Dims split_dims(const Dims& result, const Pool& p, bool whole) {
  Dims dims{result[0], result[1]};
  for (size_t i = 0; i < p.axes(); ++i) {
    dims.emplace_back(p.count[i]);
    dims.emplace_back(whole ? p.kernel[i] : 1);
  }
  return dims;
}

Dims reached_dims(const Dims& result, const Pool& p) {
  Dims dims{result[0], result[1]};
  for (int64_t rows : p.reach) dims.emplace_back(rows);
  return dims;
}

// The number of a place within its window, [1,1,1,k1,1,k2].
ValueId place_numbers(Builder& b, const Pool& p) {
  ValueId number = ir::kNoValue;
  int64_t inner = p.places;
  for (size_t i = 0; i < p.axes(); ++i) {
    inner /= p.kernel[i];
    Dims dims(2 + 2 * p.axes(), Dim(1));
    dims[3 + 2 * i] = Dim(p.kernel[i]);
    ValueId along =
        b.reshape(b.scaled(b.iota(p.kernel[i]), static_cast<double>(inner)), std::move(dims));
    number = number == ir::kNoValue ? along : b.add(number, along);
  }
  return number;
}

// Which place of its window the result is from: `numbers[k]` for the k-th of them, row by row.
ValueId chosen(Adjoint& a, const Pool& p, const Ints& numbers) {
  Builder& b = a.b;
  const ValueId x = reached(b, p, a.x(), std::numeric_limits<double>::quiet_NaN());
  ValueId found = b.scalar(ir::DType::kI64, static_cast<double>(numbers.back()));
  for (int64_t k = p.places - 1; k-- > 0;) {
    ValueId view = x;
    int64_t rest = k;
    for (size_t i = p.axes(); i-- > 0;) {
      const int64_t start = rest % p.kernel[i] * p.w.dilation[i];
      view = b.slice(view, i + 2, start, start + (p.count[i] - 1) * p.w.stride[i] + 1,
                     p.w.stride[i]);
      rest /= p.kernel[i];
    }
    const double number = static_cast<double>(numbers[static_cast<size_t>(k)]);
    found = b.where(b.op("eq", {view, a.y()}), b.scalar(ir::DType::kI64, number), found);
  }
  return b.expand(found, b.dims(a.y()));  // windows of one place
}

void largest_of_disjoint(Adjoint& a, const Pool& p) {
  Builder& b = a.b;
  const Dims result = b.dims(a.y());
  Ints numbers = all_axes(static_cast<size_t>(p.places));
  const Dims narrow = split_dims(result, p, false);
  ValueId mine = b.op("eq", {b.reshape(chosen(a, p, numbers), narrow), place_numbers(b, p)});
  ValueId dx = b.expand(b.keep_where(mine, b.reshape(a.dy(), narrow)), split_dims(result, p, true));
  a.din[0] = unreached(b, p, b.reshape(dx, reached_dims(result, p)));
}

void largest(Adjoint& a, const Pool& p) {
  Builder& b = a.b;
  const Dims result = b.dims(a.y());
  Ints along(p.axes(), 1);  // elements of a plane from one row to the next
  for (size_t i = p.axes() - 1; i-- > 0;) along[i] = along[i + 1] * p.reach[i + 1];
  Ints numbers;
  for (int64_t k = 0; k < p.places; ++k) {
    int64_t rest = k, at = 0;
    for (size_t i = p.axes(); i-- > 0;) {
      at += rest % p.kernel[i] * p.w.dilation[i] * along[i];
      rest /= p.kernel[i];
    }
    numbers.push_back(at);
  }
  ValueId at = chosen(a, p, numbers);
  for (size_t i = 0; i < p.axes(); ++i) {
    Dims column(result.size(), Dim(1));
    column[i + 2] = Dim(p.count[i]);
    const auto step = static_cast<double>(p.w.stride[i] * along[i]);
    at = b.add(at, b.reshape(b.scaled(b.iota(p.count[i]), step), std::move(column)));
  }
  int64_t plane = 1, windows = 1;
  for (size_t i = 0; i < p.axes(); ++i) plane *= p.reach[i], windows *= p.count[i];
  const Dim planes(result[0].value() * result[1].value());
  ValueId zeros = b.full({b.dtype(a.dy()), {planes, Dim(plane)}}, 0);
  ValueId sum = b.op("scatter",
                     {zeros, b.reshape(at, {planes, Dim(windows)}),
                      b.reshape(a.dy(), {planes, Dim(windows)})},
                     {{"axis", int64_t{1}}, {"kind", std::string("add")}});
  a.din[0] = unreached(b, p, b.reshape(sum, reached_dims(result, p)));
}

// dy over the number of elements that its window counts.
ValueId shared(Adjoint& a, const Pool& p) {
  Builder& b = a.b;
  if (const int64_t divisor = a.node.i_or("divisor", 0); divisor != 0) {
    return b.scaled(a.dy(), 1.0 / static_cast<double>(divisor));
  }
  const bool padding = a.node.i_or("count_include_pad", 1) != 0;
  ValueId dy = a.dy();
  for (size_t i = 0; i < p.axes(); ++i) {
    const int64_t least = padding ? -p.w.begin[i] : 0;
    const int64_t most = p.size[i] + (padding ? p.w.begin[i] : 0);
    if (-p.w.begin[i] >= least && p.reach[i] - p.w.begin[i] <= most) {
      dy = b.scaled(dy, 1.0 / static_cast<double>(p.kernel[i]));
      continue;
    }
    ValueId first = b.plus(b.scaled(b.iota(p.count[i]), static_cast<double>(p.w.stride[i])),
                           static_cast<double>(-p.w.begin[i]));
    ValueId count = ir::kNoValue;
    for (int64_t k = 0; k < p.kernel[i]; ++k) {
      ValueId at = b.plus(first, static_cast<double>(k * p.w.dilation[i]));
      ValueId in = b.op("and", {b.op("ge", {at, b.number(at, static_cast<double>(least))}),
                                b.op("lt", {at, b.number(at, static_cast<double>(most))})});
      in = b.cast(in, b.dtype(dy));
      count = count == ir::kNoValue ? in : b.add(count, in);
    }
    Dims column(p.axes() + 2, Dim(1));
    column[i + 2] = Dim(p.count[i]);
    dy = b.div(dy, b.reshape(count, std::move(column)));
  }
  return dy;
}

void mean(Adjoint& a, const Pool& p) {
  Builder& b = a.b;
  ValueId each = shared(a, p);
  if (p.disjoint) {
    const Dims result = b.dims(a.y());
    ValueId dx = b.expand(b.reshape(each, split_dims(result, p, false)),
                          split_dims(result, p, true));
    a.din[0] = unreached(b, p, b.reshape(dx, reached_dims(result, p)));
    return;
  }
  Ints padding(2 * p.axes());
  for (size_t i = 0; i < p.axes(); ++i) {
    const int64_t spread = (p.count[i] - 1) * p.w.stride[i] + 1;
    each = b.slice(b.spread(each, i + 2, p.w.stride[i]), i + 2, 0, spread);
    const int64_t reach = p.w.dilation[i] * (p.kernel[i] - 1);
    padding[i] = reach - p.w.begin[i];
    padding[i + p.axes()] = p.size[i] + reach - spread - padding[i];
  }
  a.din[0] = b.op("pool", {each},
                  {{"kind", std::string("mean")},
                   {"kernel", p.kernel},
                   {"stride", Ints(p.axes(), 1)},
                   {"dilation", p.w.dilation},
                   {"padding", padding},
                   {"divisor", int64_t{1}}});
}

void pool(Adjoint& a) {
  const Pool p = pool_of(a);
  if (a.node.s("kind") == "mean") return mean(a, p);
  if (p.places > kMostPlaces) {
    throw Error(RM_UNIMPLEMENTED,
                "[autograd] expected windows of at most " + std::to_string(kMostPlaces) +
                    " elements, got " + std::to_string(p.places),
                "RM702");
  }
  if (p.disjoint) return largest_of_disjoint(a, p);
  largest(a, p);
}

}  // namespace

std::vector<NamedRule> pool_rules() { return {{"pool", pool}}; }

}  // namespace rm::autograd
