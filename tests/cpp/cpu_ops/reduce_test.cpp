// reduce against loops over double, every kind, type and set of axes.
#include <doctest/doctest.h>

#include <cmath>

#include "harness.hpp"

using namespace rm::test;

namespace {

const std::vector<std::string> kKinds = {"sum", "mean", "max",    "min",   "prod",
                                         "any", "all",  "argmax", "argmin"};

Type result_type(const std::string& kind, Type t) {
  if (kind == "any" || kind == "all") return Type::boolean;
  if (kind == "argmax" || kind == "argmin") return Type::i64;
  if ((kind == "sum" || kind == "prod") && !is_float(t)) return Type::i64;
  return t;
}

/// The reduction of values in index order.
double fold(const std::string& kind, const std::vector<double>& v) {
  const auto n = static_cast<double>(v.size());
  double sum = 0, product = 1, most = -INFINITY, least = INFINITY;
  size_t first_most = 0, first_least = 0;
  bool any = false, all = true, nan = false;
  for (size_t i = 0; i < v.size(); ++i) {
    sum += v[i];
    product *= v[i];
    any |= v[i] != 0;
    all &= v[i] != 0;
    if (std::isnan(v[i])) {
      if (!nan) first_most = first_least = i;
      nan = true;
    } else if (!nan) {
      if (v[i] > most) most = v[i], first_most = i;
      if (v[i] < least) least = v[i], first_least = i;
    }
  }
  if (kind == "sum") return sum;
  if (kind == "mean") return sum / n;
  if (kind == "prod") return product;
  if (kind == "any") return any;
  if (kind == "all") return all;
  if (kind == "argmax") return static_cast<double>(first_most);
  if (kind == "argmin") return static_cast<double>(first_least);
  return nan ? static_cast<double>(NAN) : kind == "max" ? most : least;
}

void check(const std::string& kind, Type t, const Dims& shape, const std::vector<int64_t>& axes,
           std::mt19937& rng, bool with_nan) {
  CAPTURE(kind);
  CAPTURE(name(t));
  CAPTURE(shape);
  CAPTURE(axes);
  Dims kept = shape;
  for (int64_t a : axes)
    kept[static_cast<size_t>(a < 0 ? a + static_cast<int64_t>(shape.size()) : a)] = 1;
  const Type out = result_type(kind, t);
  Tensor x = Tensor::scrambled(t, shape, rng), y = Tensor::scrambled(out, kept, rng);
  if (kind == "prod") {
    x.fill([&](int64_t) { return rng() % 32 ? 1.0 : 2.0; });
  } else if (is_float(t)) {
    x.normal(rng);
  } else {
    x.integers(rng, 0, kind == "all" || kind == "any" ? 1 : 9);
  }
  if (with_nan && x.numel() > 3) x.set(x.numel() / 2, NAN);
  on_every_row({"reduce", {&x}, {&y}, {text("kind", kind), integers("axes", axes)}},
               [&](const std::string&) {
                 std::vector<std::vector<double>> groups(static_cast<size_t>(y.numel()));
                 for (int64_t i = 0; i < x.numel(); ++i) {
                   const Dims at = coordinates(i, shape);
                   int64_t to = 0;
                   for (size_t a = 0; a < at.size(); ++a)
                     to = to * kept[a] + (kept[a] == 1 ? 0 : at[a]);
                   groups[static_cast<size_t>(to)].push_back(x[i]);
                 }
                 int bad = 0;
                 for (int64_t i = 0; i < y.numel(); ++i) {
                   const auto& group = groups[static_cast<size_t>(i)];
                   if (group.empty() && !is_float(t)) continue;
                   double size = 0;
                   for (double v : group) size += std::abs(v);
                   const double f32 = t == Type::f64 ? 1e-15 : 1e-7;
                   bad += !close(y[i], rounded(out, fold(kind, group)), 2 * epsilon(out) + f32,
                                 is_float(out) ? f32 * size : 0);
                 }
                 CHECK(bad == 0);
               });
}

}  // namespace

TEST_CASE("reduce folds every kind and type over every set of axes") {
  std::mt19937 rng(13);
  for (const std::string& kind : kKinds) {
    for (Type t : kAll) {
      if (kind == "mean" && !is_float(t)) continue;
      for (const std::vector<int64_t>& axes :
           std::vector<std::vector<int64_t>>{{0}, {1}, {2}, {-1}, {0, 2}, {1, 2}, {0, 1, 2}}) {
        check(kind, t, {3, 17, 9}, axes, rng, false);
        check(kind, t, {2, 1, 40}, axes, rng, is_float(t) && kind[0] == 'm');
      }
    }
  }
}

TEST_CASE("reduce of nothing gives the identity") {
  std::mt19937 rng(14);
  for (const char* kind : {"sum", "mean", "max", "min", "prod", "any", "all"}) {
    check(kind, Type::f32, {3, 0}, {1}, rng, false);
    check(kind, Type::f32, {0, 3}, {1}, rng, false);
  }
}

TEST_CASE("argmax takes the first NaN, then the first of equal values") {
  Tensor x(Type::f32, {3, 40}), y(Type::i64, {3, 1});
  x.fill([](int64_t i) {
    if (i / 40 == 0) return i == 11 || i == 30 ? static_cast<double>(NAN) : static_cast<double>(i);
    return i / 40 == 1 ? 5.0 : -static_cast<double>(INFINITY);
  });
  on_every_row({"reduce", {&x}, {&y}, {text("kind", "argmax"), integers("axes", {1})}},
               [&](const std::string&) {
                 CHECK(y[0] == 11);
                 CHECK(y[1] == 0);
                 CHECK(y[2] == 0);
               });
}

TEST_CASE("long sums and wide columns keep their digits") {
  std::mt19937 rng(15);
  check("sum", Type::f32, {2, 200000}, {1}, rng, false);
  check("mean", Type::bf16, {3000, 70}, {0}, rng, false);
  check("max", Type::f16, {700, 300}, {0}, rng, true);
}
