// layer_norm, rms_norm, softmax and rope against double loops.
#include <doctest/doctest.h>

#include <cmath>

#include "harness.hpp"

using namespace rm::test;

namespace {

const std::vector<Dims> kShapes = {{1},    {7},    {3, 16},   {2, 5, 33},  {4, 384},
                                   {0, 8}, {3, 0}, {2, 1001}, {1, 2, 3, 1}};

struct Moments {
  double mean = 0, variance = 0, squares = 0;
};
Moments moments(const std::vector<double>& row) {
  Moments m;
  const auto n = static_cast<double>(row.size());
  for (double v : row) m.mean += v / n, m.squares += v * v / n;
  for (double v : row) m.variance += (v - m.mean) * (v - m.mean) / n;
  return m;
}

void check_norm(const std::string& op, Type t, Type weights, const Dims& shape, bool affine,
                bool add, std::mt19937& rng) {
  const int64_t n = shape.back();
  const bool layer = op == "layer_norm";
  Tensor x = Tensor::scrambled(t, shape, rng), residual = Tensor::scrambled(t, shape, rng);
  Tensor y = Tensor::scrambled(t, shape, rng), sum = Tensor::scrambled(t, shape, rng);
  Tensor weight = Tensor::strided(weights, {n}, {0}), bias = Tensor::strided(weights, {n}, {0});
  x.normal(rng, 3);
  residual.normal(rng);
  weight.normal(rng);
  bias.normal(rng);
  Call call{op, {&x, affine ? &weight : nullptr}, {&y, add ? &sum : nullptr}, {real("eps", 1e-5)}};
  if (layer) call.inputs.push_back(affine ? &bias : nullptr);
  call.inputs.push_back(add ? &residual : nullptr);
  if (!layer) call.attrs.push_back(real("weight_offset", 1.0));
  on_every_row(call, [&](const std::string&) {
    int bad = 0;
    for (int64_t r = 0; n > 0 && r < x.numel() / n; ++r) {
      std::vector<double> row;
      for (int64_t i = 0; i < n; ++i) row.push_back(x[r * n + i] + (add ? residual[r * n + i] : 0));
      const Moments m = moments(row);
      for (int64_t i = 0; i < n; ++i) {
        const double h = row[static_cast<size_t>(i)];
        const double scaled =
            layer ? (h - m.mean) / std::sqrt(m.variance + 1e-5) * (affine ? weight[i] : 1) +
                        (affine ? bias[i] : 0)
                  : h / std::sqrt(m.squares + 1e-5) * (affine ? weight[i] + 1 : 1);
        const double slack = t == Type::f64 ? 1e-11 : 4e-6 + epsilon(t);
        bad += !close(y[r * n + i], scaled, 2 * epsilon(t) + 1e-11, slack * 4);
        if (add) bad += !close(sum[r * n + i], h, epsilon(t), 1e-12);
      }
    }
    CHECK(bad == 0);
  });
}

}  // namespace

TEST_CASE("layer_norm and rms_norm match their formulas with and without every operand") {
  std::mt19937 rng(1);
  for (const char* op : {"layer_norm", "rms_norm"}) {
    for (Type t : kFloats) {
      for (const Dims& shape : kShapes) {
        for (int options = 0; options < 4; ++options) {
          CAPTURE(std::string(op));
          CAPTURE(name(t));
          CAPTURE(shape);
          CAPTURE(options);
          check_norm(op, t, t, shape, options & 1, options & 2, rng);
        }
      }
    }
  }
}

TEST_CASE("norms of bf16 rows take f32 weights") {
  std::mt19937 rng(2);
  check_norm("layer_norm", Type::bf16, Type::f32, {3, 64}, true, false, rng);
  check_norm("rms_norm", Type::bf16, Type::f32, {3, 64}, true, true, rng);
}

TEST_CASE("layer_norm keeps its digits when the mean is far from zero") {
  Tensor x(Type::f32, {1, 512}), y(Type::f32, {1, 512});
  x.fill([](int64_t i) { return 10000.0 + (i % 2 ? 1.0 : -1.0); });
  on_every_row({"layer_norm", {&x, nullptr, nullptr, nullptr}, {&y}, {real("eps", 1e-5)}},
               [&](const std::string&) {
                 for (int64_t i = 0; i < 512; ++i) CHECK(close(y[i], i % 2 ? 1 : -1, 1e-4, 0));
               });
}

TEST_CASE("softmax and log_softmax match their formulas") {
  std::mt19937 rng(3);
  for (Type t : kFloats) {
    for (const Dims& shape : kShapes) {
      for (bool log : {false, true}) {
        CAPTURE(name(t));
        CAPTURE(shape);
        CAPTURE(log);
        const int64_t n = shape.back();
        Tensor x = Tensor::scrambled(t, shape, rng), y = Tensor::scrambled(t, shape, rng);
        x.normal(rng, 20);
        on_every_row({"softmax", {&x}, {&y}, {integer("log", log)}}, [&](const std::string&) {
          int bad = 0;
          for (int64_t r = 0; n > 0 && r < x.numel() / n; ++r) {
            double most = -INFINITY, sum = 0;
            for (int64_t i = 0; i < n; ++i) most = std::max(most, x[r * n + i]);
            for (int64_t i = 0; i < n; ++i) sum += std::exp(x[r * n + i] - most);
            for (int64_t i = 0; i < n; ++i) {
              const double d = x[r * n + i] - most;
              const double want = log ? d - std::log(sum) : std::exp(d) / sum;
              const double slack = t == Type::f64 ? 1e-13 : 3e-7;
              // A log of 80 keeps fewer digits than one of 1: its slack scales with the row.
              bad += !close(y[r * n + i], want, epsilon(t) + 4 * slack,
                            log ? slack * 8 : 3e-38 + epsilon(t) * 1e-3);
            }
          }
          CHECK(bad == 0);
        });
      }
    }
  }
}

TEST_CASE("softmax passes NaN on and gives masked entries exactly zero") {
  for (Type t : kFloats) {
    CAPTURE(name(t));
    Tensor x(t, {4, 19}), y(t, {4, 19});
    x.fill([](int64_t i) {
      if (i / 19 == 0) return i % 3 ? 1.0 : -static_cast<double>(INFINITY);
      if (i / 19 == 1) return i % 19 == 18 ? static_cast<double>(NAN) : 0.0;
      return i / 19 == 2 ? -static_cast<double>(INFINITY) : 1.0;
    });
    on_every_row({"softmax", {&x}, {&y}, {}}, [&](const std::string&) {
      for (int64_t i = 0; i < 19; ++i) {
        if (i % 3 == 0) CHECK(y[i] == 0);
        CHECK(std::isnan(y[19 + i]));
        CHECK(std::isnan(y[38 + i]));
        CHECK(close(y[57 + i], 1.0 / 19, 2 * epsilon(t) + 1e-7, 0));
      }
    });
  }
}

TEST_CASE("rope rotates halves and pairs, with cos and sin broadcast over heads") {
  std::mt19937 rng(4);
  for (Type t : kFloats) {
    for (int64_t d : {2, 6, 16, 64, 70}) {
      for (bool interleaved : {false, true}) {
        CAPTURE(name(t));
        CAPTURE(d);
        CAPTURE(interleaved);
        const Dims shape = {2, 3, 5, d};
        Tensor x = Tensor::scrambled(t, shape, rng), y = Tensor::scrambled(t, shape, rng);
        const Type trig = t == Type::f64 ? t : Type::f32;
        Tensor cos = Tensor::strided(trig, shape, {0, 1, 2, 3}, 0, {0, 1}),
               sin = Tensor::strided(trig, shape, {0, 1, 2, 3}, 0, {0, 1});
        x.normal(rng);
        cos.normal(rng);
        sin.normal(rng);
        on_every_row({"rope", {&x, &cos, &sin}, {&y}, {integer("interleaved", interleaved)}},
                     [&](const std::string&) {
                       int bad = 0;
                       for (int64_t i = 0; i < x.numel(); ++i) {
                         const int64_t c = i % d;
                         const bool second = interleaved ? c % 2 : c >= d / 2;
                         const int64_t other = interleaved ? i ^ 1 : second ? i - d / 2 : i + d / 2;
                         const double rotated = second ? x[other] : -x[other];
                         const double want = x[i] * cos[i] + rotated * sin[i];
                         bad +=
                             !close(y[i], want, epsilon(t) + 1e-15, t == Type::f64 ? 1e-14 : 1e-6);
                       }
                       CHECK(bad == 0);
                     });
      }
    }
  }
}
