// Accuracy of the vector functions of the f32 class, in ulp against libm in double.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "harness.hpp"

using namespace rm::test;

namespace {

struct Function {
  const char* what;
  int64_t opcode;
  double (*reference)(double);
  double ulp;       // of the result
  double absolute;  // allowed besides: functions that cancel by definition
};

double ulp_of(double v) {
  const auto f = static_cast<float>(std::abs(v));
  if (!std::isfinite(f)) return 0;
  return static_cast<double>(std::nextafterf(f, INFINITY)) - static_cast<double>(f);
}

double gelu_tanh(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

float remainder_of(float a, float b) {
  const float r = std::fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

float floor_div(float a, float b) {
  if (b == 0) return a / b;
  const float r = std::fmod(a, b);
  float q = (a - r) / b;
  if (r != 0 && (b < 0) != (r < 0)) q -= 1;
  if (q == 0) return std::copysign(0.0f, a / b);
  const float f = std::floor(q);
  return q - f > 0.5f ? f + 1 : f;
}

const Function kFunctions[] = {
    {"exp", 4, [](double x) { return std::exp(x); }, 2, 0},
    {"log", 5, [](double x) { return std::log(x); }, 2, 0},
    {"sqrt", 6, [](double x) { return std::sqrt(x); }, 1, 0},
    {"rsqrt", 7, [](double x) { return 1 / std::sqrt(x); }, 2, 0},
    {"sin", 8, [](double x) { return std::sin(x); }, 2, 0},
    {"cos", 9, [](double x) { return std::cos(x); }, 2, 0},
    {"tanh", 10, [](double x) { return std::tanh(x); }, 3, 0},
    {"erf", 11, [](double x) { return std::erf(x); }, 3, 0},
    {"sigmoid", 12, [](double x) { return 1 / (1 + std::exp(-x)); }, 4, 1.2e-38},
    {"gelu", 14, [](double x) { return 0.5 * x * (1 + std::erf(x * M_SQRT1_2)); }, 4, 4e-7},
    {"gelu_tanh", 15, gelu_tanh, 6, 4e-7},
    {"silu", 16, [](double x) { return x / (1 + std::exp(-x)); }, 4, 2e-36},
    {"softplus", 23, [](double x) { return x > 20 ? x : std::log1p(std::exp(x)); }, 4, 1e-43},
    {"log1p", 24, [](double x) { return std::log1p(x); }, 2, 0},
    {"expm1", 25, [](double x) { return std::expm1(x); }, 2, 0}};

std::vector<float> inputs() {
  std::vector<float> x = {0.0f,    -0.0f,   1.0f,      -1.0f,   88.7f,   88.8f,   -87.4f,
                          -103.9f, -104.5f, 0.625f,    -0.625f, 0.9277f, 0.9278f, 4.0f,
                          -4.0f,   3.9f,    10.1f,     1e-38f,  1e-45f,  -1e-42f, 3e38f,
                          -3e38f,  1e6f,    1.0001e6f, -1e7f,   3e30f};
  // Neighbours of zeros of sin, cos and log, and of what the functions split their ranges at.
  for (float at : {1.57079637f, 3.14159274f, 355.0f, 710.0f, 9999.0f, 1e4f, 1e6f, 1.0f, 2.0f, 20.0f,
                   1.6777216e7f, 1.7014118e38f, 17.3286804f, 0.346573591f, 0.41421357f, 0.29289323f,
                   0.99999994f, 1.17549435e-38f}) {
    for (float v : {at, std::nextafterf(at, 0.0f), std::nextafterf(at, 2 * at)}) {
      x.insert(x.end(), {v, -v});
    }
  }
  const float inf = std::numeric_limits<float>::infinity();
  x.insert(x.end(), {inf, -inf, std::numeric_limits<float>::quiet_NaN()});
  std::mt19937 rng(20);
  std::normal_distribution<float> narrow(0, 2), wide(0, 40), exponent(0, 15);
  for (int i = 0; i < 20000; ++i) {
    x.push_back(narrow(rng));
    x.push_back(wide(rng));
    x.push_back((i % 2 ? 1.0f : -1.0f) * std::exp(exponent(rng)));
    x.push_back((i % 2 ? 1e-42f : -1e-42f) * static_cast<float>(i));
  }
  return x;
}

}  // namespace

TEST_CASE("vector functions stay within a few ulp over the whole range, NaN and Inf included") {
  const std::vector<float> values = inputs();
  const auto n = static_cast<int64_t>(values.size());
  Tensor x(Type::f32, {n}), y(Type::f32, {n});
  x.fill([&](int64_t i) { return values[static_cast<size_t>(i)]; });
  for (const Function& f : kFunctions) {
    CAPTURE(std::string(f.what));
    on_every_row({"ewise", {&x}, {&y}, {integers("code", {f.opcode, 0, 0, -1, -1})}},
                 [&](const std::string&) {
                   double worst = 0;
                   double where = 0;
                   int special = 0;
                   for (int64_t i = 0; i < n; ++i) {
                     const double want = f.reference(x[i]), got = y[i];
                     const auto single = static_cast<float>(want);
                     if (std::isnan(single)) {
                       // 0.5 x (1 + tanh) of -inf is NaN by its formula and so it is in torch.
                       special += !std::isnan(got);
                     } else if (std::isinf(single)) {
                       special += got != static_cast<double>(single);
                     } else {
                       // Functions that are odd, or the identity, at 0 keep its sign.
                       if (want == 0 && x[i] == 0)
                         special += std::signbit(got) != std::signbit(want);
                       const double error =
                           std::max(0.0, std::abs(got - want) - f.absolute) / ulp_of(want);
                       if (!(error <= worst)) worst = error, where = x[i];
                     }
                   }
                   CAPTURE(where);
                   CHECK(special == 0);
                   CHECK(worst <= f.ulp);
                 });
  }
}

TEST_CASE("the derivative of gelu is right however it is written, and what looks like it is not taken for it") {
  // Registers: 0 dy, 1 x; (erf(x a) + b) c + (x exp((x x) d)) e, times dy. With `swapped` operands are exchanged.
  const auto code = [](bool swapped) {
    std::vector<int64_t> out;
    const auto add = [&](int64_t op, int64_t a, int64_t b = -1) {
      if (swapped && b >= 0) std::swap(a, b);
      out.insert(out.end(), {op, 0, a, b, -1});
    };
    add(0, 0), add(42, 1, 2), add(11, 3), add(0, 1), add(40, 4, 5), add(0, 2), add(42, 6, 7);
    add(42, 1, 1), add(0, 3), add(42, 9, 10), add(4, 11), add(0, 4), add(42, 12, 13), add(42, 1, 14);
    add(40, 8, 15), add(42, 0, 16);
    return out;
  };
  const std::vector<double> numbers = {static_cast<float>(M_SQRT1_2), 1, 0.5, -0.5, 0.39894227683544159};
  std::vector<float> values = inputs();
  const auto n = static_cast<int64_t>(values.size());
  Tensor dy(Type::f32, {n}), x(Type::f32, {n}), y(Type::f32, {n});
  x.fill([&](int64_t i) { return values[static_cast<size_t>(i)]; });
  dy.fill([](int64_t i) { return i % 2 ? 1.0 : -2.0; });
  for (size_t changed = 0; changed <= numbers.size(); ++changed) {
    std::vector<double> imm = numbers;
    if (changed < imm.size()) imm[changed] *= 0.75;
    for (bool swapped : {false, true}) {
      CAPTURE(changed);
      CAPTURE(swapped);
      on_every_row({"ewise", {&dy, &x}, {&y}, {integers("code", code(swapped)), reals("imm", imm)}},
                   [&](const std::string&) {
                     int bad = 0;
                     for (int64_t i = 0; i < n; ++i) {
                       const double v = x[i];
                       const double want = dy[i] * ((std::erf(v * imm[0]) + imm[1]) * imm[2] +
                                                    v * std::exp(v * v * imm[3]) * imm[4]);
                       bad += !close(y[i], std::isfinite(v) ? want : NAN, 2e-6, 1e-6);
                     }
                     CHECK(bad == 0);
                   });
    }
  }
  // The density within it is read once more: by the last instruction.
  std::vector<int64_t> twice = code(false);
  twice.insert(twice.end(), {42, 0, 17, 12, -1});
  on_every_row({"ewise", {&dy, &x}, {&y}, {integers("code", twice), reals("imm", numbers)}},
               [&](const std::string&) {
                 int bad = 0;
                 for (int64_t i = 0; i < n; ++i) {
                   const double v = x[i], bell = std::exp(v * v * -0.5);
                   const double slope = (std::erf(v * M_SQRT1_2) + 1) * 0.5 + v * bell * numbers[4];
                   bad += !close(y[i], std::isfinite(v) ? dy[i] * slope * bell : NAN, 2e-6, 1e-6);
                 }
                 CHECK(bad == 0);
               });
}

TEST_CASE("pow keeps libm's signs, Inf and NaN, and 2 ulp everywhere") {
  const float inf = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  std::vector<float> bases = {
      0.0f,   1.0f,  0.99999994f, 1.0000001f, 2.0f,        0.5f,        10.0f, 1e-45f,
      1e-40f, 1e30f, 3.4e38f,     1.4142135f, 0.70710677f, 0.70710683f, inf,   nan};
  std::vector<float> powers = {0.0f,   1e-45f,  1e-30f,     0.3f,       0.5f,        1.0f,
                               1.5f,   2.0f,    3.0f,       4.0f,       7.0f,        100.0f,
                               127.0f, 149.0f,  8388607.5f, 8388609.0f, 16777215.0f, 16777216.0f,
                               3e9f,   3.4e38f, inf,        nan};
  std::mt19937 rng(7);
  std::normal_distribution<float> normal(0, 3), exponent(0, 20);
  for (int i = 0; i < 150; ++i) bases.push_back(std::exp(exponent(rng)));
  for (int i = 0; i < 150; ++i) powers.push_back(i % 3 ? normal(rng) : std::exp(exponent(rng)));
  std::vector<float> a, b;
  for (float x : bases) {
    for (float y : powers) {
      a.insert(a.end(), {x, x, -x, -x});
      b.insert(b.end(), {y, -y, y, -y});
    }
  }
  const auto n = static_cast<int64_t>(a.size());
  Tensor x(Type::f32, {n}), y(Type::f32, {n}), z(Type::f32, {n});
  x.fill([&](int64_t i) { return a[static_cast<size_t>(i)]; });
  y.fill([&](int64_t i) { return b[static_cast<size_t>(i)]; });
  on_every_row({"ewise", {&x, &y}, {&z}, {integers("code", {44, 0, 0, 1, -1})}},
               [&](const std::string&) {
                 double worst = 0;
                 int special = 0;
                 int64_t where = -1;
                 for (int64_t i = 0; i < n; ++i) {
                   const double want = std::pow(x[i], y[i]), got = z[i];
                   const auto single = static_cast<float>(want);
                   bool right = std::isnan(got);
                   if (!std::isnan(single)) right = std::signbit(single) == std::signbit(got);
                   if (std::isinf(single)) right = got == static_cast<double>(single);
                   if (!right && !special++) where = i;
                   if (!std::isfinite(single)) continue;
                   const double error = std::abs(got - want) / ulp_of(want);
                   if (!(error <= worst)) worst = error, where = i;
                 }
                 CAPTURE(x[where < 0 ? 0 : where]);
                 CAPTURE(y[where < 0 ? 0 : where]);
                 CHECK(special == 0);
                 CHECK(worst <= 2);
               });
}

TEST_CASE("remainder and floor_divide are torch's steps on fmod, bit by bit") {
  const float inf = std::numeric_limits<float>::infinity();
  std::vector<float> values = {0.0f,         1.0f, 0.1f,   0.3f,   1.5f,
                               3.0f,         7.0f, 1e-45f, 1e-38f, 4194304.0f,
                               268435456.0f, 3e9f, 3e38f,  inf,    std::nanf("")};
  std::mt19937 rng(9);
  std::normal_distribution<float> normal(0, 10), exponent(0, 8);
  for (int i = 0; i < 200; ++i) values.push_back(i % 2 ? normal(rng) : std::exp(exponent(rng)));
  std::vector<float> a, b;
  for (float x : values) {
    for (float y : values) {
      a.insert(a.end(), {x, x, -x, -x, x * y});
      b.insert(b.end(), {y, -y, y, -y, y});
    }
  }
  const auto n = static_cast<int64_t>(a.size());
  Tensor x(Type::f32, {n}), y(Type::f32, {n}), z(Type::f32, {n});
  x.fill([&](int64_t i) { return a[static_cast<size_t>(i)]; });
  y.fill([&](int64_t i) { return b[static_cast<size_t>(i)]; });
  for (int64_t opcode : {47, 48}) {
    CAPTURE(opcode);
    on_every_row({"ewise", {&x, &y}, {&z}, {integers("code", {opcode, 0, 0, 1, -1})}},
                 [&](const std::string&) {
                   int wrong = 0;
                   int64_t where = 0;
                   for (int64_t i = 0; i < n; ++i) {
                     const auto p = a[static_cast<size_t>(i)], q = b[static_cast<size_t>(i)];
                     const float want = opcode == 47 ? floor_div(p, q) : remainder_of(p, q);
                     const double got = z[i];
                     const bool same = std::isnan(want)
                                           ? std::isnan(got)
                                           : got == static_cast<double>(want) &&
                                                 std::signbit(got) == std::signbit(want);
                     if (!same && !wrong++) where = i;
                   }
                   CAPTURE(a[static_cast<size_t>(where)]);
                   CAPTURE(b[static_cast<size_t>(where)]);
                   CHECK(wrong == 0);
                 });
  }
}

TEST_CASE("the small powers and the libm ones agree with pow") {
  std::mt19937 rng(4);
  Tensor x(Type::f32, {1000}), y(Type::f32, {1000});
  x.fill([&](int64_t i) { return static_cast<double>(i % 100) * 0.07; });
  for (double power : {2.0, 3.0, 0.5, -0.5, -1.0, 1.7, 0.0, -2.0}) {
    CAPTURE(power);
    on_every_row({"ewise",
                  {&x},
                  {&y},
                  {integers("code", {0, 0, 0, -1, -1, 44, 0, 0, 1, -1}), reals("imm", {power})}},
                 [&](const std::string&) {
                   for (int64_t i = 0; i < 1000; ++i) {
                     CHECK(close(y[i], std::pow(x[i], power), 3e-7, 0));
                   }
                 });
  }
}
