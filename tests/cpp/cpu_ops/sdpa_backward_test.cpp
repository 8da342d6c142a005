// sdpa_backward against its definition in double: masks, grouped heads, layouts, what masks close.
#include <doctest/doctest.h>
#include <omp.h>

#include <array>
#include <cmath>
#include <limits>

#include "harness.hpp"

using namespace rm::test;

namespace {

struct Case {
  int64_t b, h, g, s, t, d, e;
};
enum class Mask { none, causal, boolean, padding, causal_padding, additive };

struct Problem {
  Case c;
  Tensor q, k, v, mask, y, lse, dy, dq, dk, dv;
  bool causal, masked;
  double scale = 0.3;

  Call call() {
    return {"sdpa_backward",
            {&q, &k, &v, masked ? &mask : nullptr, nullptr, &y, &lse, &dy},
            {&dq, &dk, &dv},
            {real("scale", scale), integer("is_causal", causal)}};
  }

  /// What query (b, h, s) adds to the score of key t: minus infinity for one it does not see.
  double addend(int64_t b, int64_t h, int64_t s, int64_t t) const {
    if (causal && t > s) return -INFINITY;
    if (!masked) return 0;
    const double m = mask.at({b, h, s, t});
    return mask.type() != Type::boolean ? m : m != 0 ? 0 : -INFINITY;
  }
  double score(int64_t b, int64_t h, int64_t s, int64_t t) const {
    const double added = addend(b, h, s, t);
    if (added == -INFINITY) return added;
    double x = 0;
    for (int64_t i = 0; i < c.d; ++i) {
      x += q.at({b, h, s, i}) * k.at({b, h / (c.h / c.g), t, i});
    }
    return x * scale + added;
  }
};

Tensor make_mask(const Case& c, Mask kind, Type type, std::mt19937& rng) {
  const Dims shape = {c.b, c.h, c.s, c.t};
  if (kind == Mask::additive) return Tensor::strided(type, shape, {0, 1, 2, 3}, 1, {0}).normal(rng);
  if (kind == Mask::padding || kind == Mask::causal_padding) {
    Tensor m = Tensor::strided(Type::boolean, shape, {0, 1, 2, 3}, 0, {1, 2});
    return m.fill([&](int64_t i) { return i % c.t <= c.t / 2; });
  }
  Tensor m = Tensor::strided(Type::boolean, shape, {0, 1, 2, 3}, 0, {1});
  return m.fill([&](int64_t i) {  // the first row sees nothing
    return i / c.t % c.s == 0 ? 0.0 : (i * 2654435761u >> 8) % 3 ? 1.0 : 0.0;
  });
}

Problem make(const Case& c, Type type, Mask kind, std::mt19937& rng) {
  const Type lse = type == Type::f64 ? type : Type::f32;
  Problem p{c,
            Tensor::scrambled(type, {c.b, c.h, c.s, c.d}, rng),
            Tensor::scrambled(type, {c.b, c.g, c.t, c.d}, rng),
            Tensor::strided(type, {c.b, c.g, c.t, c.e}, {0, 2, 1, 3}),
            make_mask(c, kind, lse, rng),
            Tensor::strided(type, {c.b, c.h, c.s, c.e}, {0, 2, 1, 3}),
            Tensor(lse, {c.b, c.h, c.s}),
            Tensor::scrambled(type, {c.b, c.h, c.s, c.e}, rng),
            Tensor::scrambled(type, {c.b, c.h, c.s, c.d}, rng),
            Tensor::strided(type, {c.b, c.g, c.t, c.d}, {0, 2, 1, 3}, 3),
            Tensor::scrambled(type, {c.b, c.g, c.t, c.e}, rng),
            kind == Mask::causal || kind == Mask::causal_padding,
            kind != Mask::none && kind != Mask::causal};
  p.q.normal(rng), p.k.normal(rng), p.v.normal(rng), p.dy.normal(rng);
  int64_t row = 0;
  for (int64_t b = 0; b < c.b; ++b) {
    for (int64_t h = 0; h < c.h; ++h) {
      for (int64_t s = 0; s < c.s; ++s, ++row) {
        double sum = 0;
        std::vector<double> y(static_cast<size_t>(c.e), 0.0);
        for (int64_t t = 0; t < c.t; ++t) {
          const double w = std::exp(p.score(b, h, s, t));
          sum += w;
          for (int64_t i = 0; w != 0 && i < c.e; ++i) {
            y[static_cast<size_t>(i)] += w * p.v.at({b, h / (c.h / c.g), t, i});
          }
        }
        p.lse.set(row, std::log(sum));
        for (int64_t i = 0; i < c.e; ++i) {
          p.y.set(row * c.e + i, sum == 0 ? 0 : y[static_cast<size_t>(i)] / sum);
        }
      }
    }
  }
  return p;
}

/// dq, dk and dv, element by element in the order of their indices.
std::array<std::vector<double>, 3> reference(const Problem& p) {
  const Case& c = p.c;
  const auto zeros = [](int64_t n) { return std::vector<double>(static_cast<size_t>(n), 0.0); };
  std::array out{zeros(c.b * c.h * c.s * c.d), zeros(c.b * c.g * c.t * c.d),
                 zeros(c.b * c.g * c.t * c.e)};
  for (int64_t row = 0; row < c.b * c.h * c.s; ++row) {
    const int64_t s = row % c.s, h = row / c.s % c.h, b = row / c.s / c.h, g = h / (c.h / c.g);
    double mean = 0;
    for (int64_t i = 0; i < c.e; ++i) mean += p.dy.at({b, h, s, i}) * p.y.at({b, h, s, i});
    for (int64_t t = 0; t < c.t; ++t) {
      const double score = p.score(b, h, s, t);
      if (score == -INFINITY) continue;
      const double w = std::exp(score - p.lse[row]);
      double slope = 0;
      for (int64_t i = 0; i < c.e; ++i) slope += p.dy.at({b, h, s, i}) * p.v.at({b, g, t, i});
      slope = w * (slope - mean) * p.scale;
      const int64_t key = ((b * c.g + g) * c.t + t);
      for (int64_t i = 0; i < c.d; ++i) {
        out[0][static_cast<size_t>(row * c.d + i)] += slope * p.k.at({b, g, t, i});
        out[1][static_cast<size_t>(key * c.d + i)] += slope * p.q.at({b, h, s, i});
      }
      for (int64_t i = 0; i < c.e; ++i) {
        out[2][static_cast<size_t>(key * c.e + i)] += w * p.dy.at({b, h, s, i});
      }
    }
  }
  return out;
}

}  // namespace

TEST_CASE("sdpa_backward matches its definition for every mask, type and size class") {
  std::mt19937 rng(31);
  const std::vector<Case> cases = {
      {1, 1, 1, 1, 1, 1, 1},     {2, 4, 2, 7, 9, 16, 16},   {1, 3, 1, 5, 33, 20, 12},
      {1, 2, 2, 61, 61, 32, 32}, {2, 6, 2, 50, 70, 40, 40}, {1, 2, 1, 13, 300, 24, 33},
      {1, 1, 1, 99, 280, 8, 8},  {0, 2, 2, 4, 4, 8, 8},     {1, 2, 2, 0, 4, 8, 8},
      {1, 2, 2, 6, 0, 8, 8}};
  for (const Case& c : cases) {
    for (Type type : kFloats) {
      for (Mask kind : {Mask::none, Mask::causal, Mask::boolean, Mask::padding,
                        Mask::causal_padding, Mask::additive}) {
        CAPTURE(name(type));
        CAPTURE(Dims({c.b, c.h, c.g, c.s, c.t, c.d, c.e}));
        CAPTURE(static_cast<int>(kind));
        Problem p = make(c, type, kind, rng);
        const auto want = reference(p);
        const double slack = type == Type::f64 ? 1e-11 : 4e-5 + 2 * epsilon(type);
        on_every_row(p.call(), [&](const std::string&) {
          const Tensor* got[] = {&p.dq, &p.dk, &p.dv};
          for (size_t i = 0; i < 3; ++i) {
            int bad = 0;
            for (int64_t j = 0; j < got[i]->numel(); ++j) {
              bad += !close((*got[i])[j], want[i][static_cast<size_t>(j)],
                            2 * epsilon(type) + 1e-5 * (type != Type::f64), slack);
            }
            CAPTURE(i);
            CHECK(bad == 0);
          }
        });
      }
    }
  }
}

TEST_CASE("sdpa_backward takes nothing from keys that are closed, whatever lies there") {
  std::mt19937 rng(32);
  const Case c{1, 2, 1, 40, 70, 16, 16};
  for (Mask kind : {Mask::padding, Mask::causal_padding}) {
    Problem p = make(c, Type::f32, kind, rng);
    const auto want = reference(p);
    for (int64_t t = c.t / 2 + 1; t < c.t; ++t) {
      for (int64_t i = 0; i < c.d; ++i) {
        p.k.set(t * c.d + i, NAN);
        p.v.set(t * c.e + i, i % 2 ? NAN : INFINITY);
      }
    }
    on_every_row(p.call(), [&](const std::string&) {
      const Tensor* got[] = {&p.dq, &p.dk, &p.dv};
      for (size_t i = 0; i < 3; ++i) {
        int bad = 0;
        for (int64_t j = 0; j < got[i]->numel(); ++j) {
          bad += !close((*got[i])[j], want[i][static_cast<size_t>(j)], 1e-5, 4e-5);
        }
        CAPTURE(i);
        CHECK(bad == 0);
      }
    });
  }
}

TEST_CASE("sdpa_backward gives the same bits on any number of threads") {
  std::mt19937 rng(33);
  for (Type type : {Type::f32, Type::bf16}) {
    Problem p = make({2, 4, 2, 200, 300, 64, 64}, type, Mask::none, rng);
    const int threads = omp_get_max_threads();
    for (const rm_kernel* row : rows("sdpa_backward")) {
      if (!supports(*row, p.call())) continue;
      std::vector<double> first;
      for (int n : {1, 2, 3}) {
        omp_set_num_threads(n);
        REQUIRE(run(*row, p.call()).code == RM_OK);
        std::vector<double> now;
        for (const Tensor* t : {&p.dq, &p.dk, &p.dv}) {
          for (int64_t i = 0; i < t->numel(); ++i) now.push_back((*t)[i]);
        }
        if (n == 1) first = now;
        CHECK(now == first);
      }
    }
    omp_set_num_threads(threads);
  }
}
