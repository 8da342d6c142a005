// ewise programs against a straightforward interpreter over doubles, on random layouts.
#include <doctest/doctest.h>

#include <cmath>

#include "harness.hpp"

using namespace rm::test;

namespace {

enum : int64_t { F32 = 0, F64 = 1, I64 = 2 };

/// One instruction as the five integers of the program.
void op(std::vector<int64_t>& code, int64_t opcode, int64_t cls, int64_t a, int64_t b = -1,
        int64_t c = -1) {
  for (int64_t v : {opcode, cls, a, b, c}) code.push_back(v);
}

}  // namespace

TEST_CASE("ewise adds and multiplies every mix of types, layouts and broadcasts") {
  std::mt19937 rng(11);
  for (Type a : kAll) {
    for (Type out : {Type::f32, Type::bf16, Type::f16, Type::f64}) {
      for (const Dims& shape : {Dims{}, Dims{1}, Dims{0, 3}, Dims{7}, Dims{3, 5}, Dims{2, 3, 257},
                                Dims{300, 2}, Dims{4, 1, 129}}) {
        CAPTURE(name(a));
        CAPTURE(name(out));
        CAPTURE(shape);
        Tensor x = Tensor::scrambled(a, shape, rng), y = Tensor::scrambled(out, shape, rng);
        std::vector<int> axes(shape.size()), broadcast;
        for (size_t i = 0; i < axes.size(); ++i) {
          axes[i] = static_cast<int>(i);
          if (rng() % 2) broadcast.push_back(static_cast<int>(i));
        }
        Tensor z = Tensor::strided(Type::f32, shape, axes, 1, broadcast);
        x.normal(rng);
        z.normal(rng);
        std::vector<int64_t> code;
        op(code, 40, out == Type::f64 ? F64 : F32, 0, 1);
        op(code, 42, out == Type::f64 ? F64 : F32, 2, 1);
        on_every_row({"ewise", {&x, &z}, {&y}, {integers("code", code)}}, [&](const std::string&) {
          int bad = 0;
          for (int64_t i = 0; i < y.numel(); ++i) {
            const double want = (x[i] + z[i]) * z[i];
            bad += !close(y[i], want, epsilon(out) + 4e-7, 1e-6);
          }
          CHECK(bad == 0);
        });
      }
    }
  }
}

TEST_CASE("ewise gives every row its own element where operands repeat one along the row") {
  std::mt19937 rng(12);
  for (Type t : kAll) {
    for (const Dims& shape : {Dims{3, 1300}, Dims{2, 3, 513}, Dims{5, 512}, Dims{4, 2048}}) {
      CAPTURE(name(t));
      CAPTURE(shape);
      const int last = static_cast<int>(shape.size()) - 1;
      std::vector<int> order(shape.size());
      for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
      // More operands than the fills that are remembered, every third one the same for all rows.
      std::vector<Tensor> factors;
      for (int i = 0; i < 20; ++i) {
        std::vector<int> repeated = {last};
        if (i % 3 == 0) repeated = order;
        factors.push_back(Tensor::strided(t, shape, order, 0, repeated));
        factors.back().integers(rng, 0, 1);
      }
      Tensor y(Type::f64, shape);
      std::vector<int64_t> code;
      op(code, 40, F64, 0, 1);
      std::vector<const Tensor*> inputs = {&factors[0], &factors[1]};
      for (int i = 2; i < 20; ++i) {
        op(code, 40, F64, 20 + i - 2, i);
        inputs.push_back(&factors[static_cast<size_t>(i)]);
      }
      on_every_row({"ewise", inputs, {&y}, {integers("code", code)}}, [&](const std::string&) {
        int bad = 0;
        for (int64_t i = 0; i < y.numel(); ++i) {
          double want = 0;
          for (const Tensor& f : factors) want += f[i];
          bad += y[i] != want;
        }
        CHECK(bad == 0);
      });
    }
  }
}

TEST_CASE("ewise compares, combines and selects, with NaN on no side of a comparison") {
  const double nan = NAN;
  const std::vector<double> values = {nan, -INFINITY, -1, -0.0, 0, 1, INFINITY};
  const auto n = static_cast<int64_t>(values.size() * values.size());
  Tensor x(Type::f32, {n}), z(Type::f32, {n}), y(Type::boolean, {n}), w(Type::f32, {n});
  x.fill([&](int64_t i) { return values[static_cast<size_t>(i) / values.size()]; });
  z.fill([&](int64_t i) { return values[static_cast<size_t>(i) % values.size()]; });
  const std::vector<std::pair<int64_t, bool (*)(double, double)>> comparisons = {
      {49, [](double a, double b) { return a == b; }},
      {50, [](double a, double b) { return a != b; }},
      {51, [](double a, double b) { return a < b; }},
      {52, [](double a, double b) { return a <= b; }},
      {53, [](double a, double b) { return a > b; }},
      {54, [](double a, double b) { return a >= b; }}};
  for (int64_t cls : {F32, F64}) {
    for (const auto& [opcode, reference] : comparisons) {
      CAPTURE(opcode);
      on_every_row({"ewise", {&x, &z}, {&y}, {integers("code", {opcode, cls, 0, 1, -1})}},
                   [&](const std::string&) {
                     for (int64_t i = 0; i < n; ++i) CHECK(y[i] == reference(x[i], z[i]));
                   });
      // where(comparison and not isnan(x), x, z)
      std::vector<int64_t> code;
      op(code, opcode, cls, 0, 1);
      op(code, 26, cls, 0);
      op(code, 17, I64, 3);
      op(code, 55, I64, 2, 4);
      op(code, 70, cls, 5, 0, 1);
      on_every_row({"ewise", {&x, &z}, {&w}, {integers("code", code)}}, [&](const std::string&) {
        for (int64_t i = 0; i < n; ++i) {
          const double want = reference(x[i], z[i]) && !std::isnan(x[i]) ? x[i] : z[i];
          CHECK(close(w[i], want, 0, 0));
        }
      });
    }
  }
}

TEST_CASE("ewise minimum and maximum let NaN win") {
  Tensor x(Type::f32, {4}), z(Type::f32, {4}), y(Type::f32, {4});
  x.fill([](int64_t i) { return std::vector<double>{1, NAN, 3, NAN}[static_cast<size_t>(i)]; });
  z.fill([](int64_t i) { return std::vector<double>{2, 1, NAN, NAN}[static_cast<size_t>(i)]; });
  for (int64_t opcode : {45, 46}) {
    for (int64_t cls : {F32, F64}) {
      on_every_row({"ewise", {&x, &z}, {&y}, {integers("code", {opcode, cls, 0, 1, -1})}},
                   [&](const std::string&) {
                     CHECK(y[0] == (opcode == 45 ? 1 : 2));
                     for (int64_t i = 1; i < 4; ++i) CHECK(std::isnan(y[i]));
                   });
    }
  }
}

TEST_CASE("ewise integer division floors, truncates and keeps the divisor's sign") {
  std::mt19937 rng(3);
  for (Type t : {Type::i64, Type::i32, Type::i16, Type::i8}) {
    Tensor x = Tensor::scrambled(t, {9, 31}, rng), z = Tensor::scrambled(t, {9, 31}, rng),
           y = Tensor::scrambled(t, {9, 31}, rng);
    x.integers(rng, -100, 100);
    z.integers(rng, -5, 5);
    for (int64_t i = 0; i < z.numel(); ++i) {
      if (z[i] == 0) z.set(i, 7);
    }
    for (int64_t opcode : {43, 47, 48}) {
      on_every_row({"ewise", {&x, &z}, {&y}, {integers("code", {opcode, I64, 0, 1, -1})}},
                   [&](const std::string&) {
                     for (int64_t i = 0; i < y.numel(); ++i) {
                       const double q = x[i] / z[i], floor = std::floor(q);
                       const double want = opcode == 43   ? std::trunc(q)
                                           : opcode == 47 ? floor
                                                          : x[i] - floor * z[i];
                       CHECK(y[i] == want);
                     }
                   });
    }
  }
}

TEST_CASE("ewise survives the smallest integer divided by minus one") {
  Tensor x(Type::i64, {1}), z(Type::i64, {1}), y(Type::i64, {1});
  const int64_t low = INT64_MIN;
  x.set(0, static_cast<double>(low));
  z.set(0, -1);
  for (int64_t opcode : {43, 47}) {
    on_every_row({"ewise", {&x, &z}, {&y}, {integers("code", {opcode, I64, 0, 1, -1})}},
                 [&](const std::string&) { CHECK(y[0] == static_cast<double>(low)); });
  }
}

TEST_CASE("ewise refuses integer division by zero instead of trapping") {
  Tensor x(Type::i32, {5}), z(Type::i32, {5}), y(Type::i32, {5});
  x.fill([](int64_t) { return 3; });
  z.fill([](int64_t i) { return static_cast<double>(i); });
  for (int64_t opcode : {43, 47, 48}) {
    for (const rm_kernel* row : rows("ewise")) {
      const Call call{"ewise", {&x, &z}, {&y}, {integers("code", {opcode, I64, 0, 1, -1})}};
      if (!supports(*row, call)) continue;
      CHECK(run(*row, call).code == RM_INVALID_ARGUMENT);
    }
  }
}

TEST_CASE("ewise rounds half to even on the way to bf16 and f16 and truncates to integers") {
  const std::vector<double> values = {1.00390625, 1.01171875, 65504,  65520,     65519.9, 1e-8,
                                      6.1e-5,     5.97e-8,    -2.7,   2.9999998, -0.0,    1e39,
                                      NAN,        INFINITY,   3.5e38, 2.98e-8,   2.99e-8, 8.9e-8};
  const auto n = static_cast<int64_t>(values.size());
  Tensor x(Type::f32, {n});
  x.fill([&](int64_t i) { return values[static_cast<size_t>(i)]; });
  for (Type t : {Type::bf16, Type::f16}) {
    CAPTURE(name(t));
    Tensor y(t, {n});
    on_every_row({"ewise", {&x}, {&y}, {integers("code", {1, F32, 0, -1, -1})}},
                 [&](const std::string&) {
                   for (int64_t i = 0; i < n; ++i) {
                     CAPTURE(x[i]);
                     CHECK(close(y[i], rounded(t, x[i]), 0, 0));
                   }
                 });
  }
  Tensor small(Type::f32, {4}), whole(Type::i32, {4});
  small.fill([](int64_t i) {
    return std::vector<double>{-2.7, 2.7, -0.5, 41}[static_cast<size_t>(i)];
  });
  on_every_row({"ewise", {&small}, {&whole}, {integers("code", {1, F32, 0, -1, -1})}},
               [&](const std::string&) {
                 for (int64_t i = 0; i < 4; ++i) CHECK(whole[i] == std::trunc(small[i]));
               });
}

TEST_CASE("ewise reads f16 and bf16 exactly, subnormals included") {
  for (Type t : {Type::bf16, Type::f16}) {
    Tensor x(t, {40}), y(Type::f32, {40});
    x.fill([&](int64_t i) { return std::ldexp(i % 2 ? 1.0 : -1.5, static_cast<int>(15 - i)); });
    on_every_row({"ewise", {&x}, {&y}, {integers("code", {1, F32, 0, -1, -1})}},
                 [&](const std::string&) {
                   for (int64_t i = 0; i < 40; ++i) CHECK(y[i] == x[i]);
                 });
  }
}

TEST_CASE("ewise runs long programs whose registers outlive many blocks") {
  std::mt19937 rng(5);
  Tensor x(Type::f32, {3, 1000}), y = Tensor::scrambled(Type::f32, {3, 1000}, rng);
  x.normal(rng);
  std::vector<int64_t> code;
  op(code, 0, F32, 0);  // r1 = 0.5
  int64_t last = 0;
  for (int i = 0; i < 40; ++i) {  // r = r * 0.5 + x
    op(code, 71, F32, last, 1, 0);
    last = 2 + i;
  }
  on_every_row({"ewise", {&x}, {&y}, {integers("code", code), reals("imm", {0.5})}},
               [&](const std::string&) {
                 for (int64_t i = 0; i < y.numel(); ++i) CHECK(close(y[i], 2 * x[i], 1e-6, 1e-6));
               });
}

TEST_CASE("ewise may write where it reads") {
  std::mt19937 rng(6);
  Tensor x(Type::f32, {5000});
  x.normal(rng);
  std::vector<double> before;
  for (int64_t i = 0; i < x.numel(); ++i) before.push_back(x[i]);
  std::vector<int64_t> code;
  op(code, 4, F32, 0);
  op(code, 40, F32, 1, 0);
  for (const rm_kernel* row : rows("ewise")) {
    const Call call{"ewise", {&x}, {&x}, {integers("code", code)}};
    if (!supports(*row, call)) continue;
    for (int64_t i = 0; i < x.numel(); ++i) x.set(i, before[static_cast<size_t>(i)]);
    REQUIRE(run(*row, call).code == RM_OK);
    for (int64_t i = 0; i < x.numel(); ++i) {
      const double b = before[static_cast<size_t>(i)];
      CHECK(close(x[i], std::exp(b) + b, 1e-6, 1e-6));
    }
  }
}

TEST_CASE("ewise refuses programs that are not legal") {
  Tensor x(Type::f32, {4}), y(Type::f32, {4});
  const std::vector<std::vector<int64_t>> bad = {
      {}, {40, 0, 0}, {40, 0, 0, 9, -1}, {99, 0, 0, -1, -1}, {40, 7, 0, 0, -1}, {0, 0, 3, -1, -1}};
  for (const auto& code : bad) {
    const Call call{"ewise", {&x}, {&y}, {integers("code", code)}};
    CHECK(run(*rows("ewise").back(), call).code == RM_INVALID_ARGUMENT);
  }
}
