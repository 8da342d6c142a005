// Accuracy of the vector functions of the f32 class, in ulp against libm in double.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>

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
    {"log1p", 24, [](double x) { return std::log1p(x); }, 2, 0},
    {"expm1", 25, [](double x) { return std::expm1(x); }, 2, 0}};

std::vector<float> inputs() {
  std::vector<float> x = {0.0f,    -0.0f,   1.0f,      -1.0f,   88.7f,   88.8f,   -87.4f,
                          -103.9f, -104.5f, 0.625f,    -0.625f, 0.9277f, 0.9278f, 4.0f,
                          -4.0f,   3.9f,    10.1f,     1e-38f,  1e-45f,  -1e-42f, 3e38f,
                          -3e38f,  1e6f,    1.0001e6f, -1e7f,   3e30f};
  const float inf = std::numeric_limits<float>::infinity();
  x.insert(x.end(), {inf, -inf, std::numeric_limits<float>::quiet_NaN()});
  std::mt19937 rng(20);
  std::normal_distribution<float> narrow(0, 2), wide(0, 40), exponent(0, 15);
  for (int i = 0; i < 20000; ++i) {
    x.push_back(narrow(rng));
    x.push_back(wide(rng));
    x.push_back((i % 2 ? 1.0f : -1.0f) * std::exp(exponent(rng)));
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
