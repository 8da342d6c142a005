// sdpa against its definition in double: prefill and decode sizes, masks, grouped heads, layouts.
#include <doctest/doctest.h>
#include <omp.h>

#include <cmath>

#include "harness.hpp"

using namespace rm::test;

namespace {

struct Case {
  int64_t b, h, g, s, t, d, e;
};
enum class Mask { none, causal, boolean, padding, additive, causal_padding, cache, window, lowest };

/// The results of one query: `at` is its batch, head and position.
std::vector<double> reference(const Case& c, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor* mask, bool causal, double scale, const Dims& at) {
  const int64_t g = at[1] / (c.h / c.g);
  std::vector<double> score(static_cast<size_t>(c.t), -INFINITY);
  std::vector<double> out(static_cast<size_t>(c.e), 0.0);
  double most = -INFINITY, sum = 0;
  for (int64_t t = 0; t < c.t; ++t) {
    if (causal && t > at[2]) continue;
    double x = 0;
    for (int64_t d = 0; d < c.d; ++d) x += q.at({at[0], at[1], at[2], d}) * k.at({at[0], g, t, d});
    x *= scale;
    if (mask) {
      const double m = mask->at({at[0], at[1], at[2], t});
      x = mask->type() == Type::boolean ? (m != 0 ? x : -INFINITY) : x + m;
    }
    score[static_cast<size_t>(t)] = x;
    most = std::max(most, x);
  }
  if (most == -INFINITY) return out;
  for (int64_t t = 0; t < c.t; ++t) {
    const double w = std::exp(score[static_cast<size_t>(t)] - most);
    sum += w;
    if (w == 0) continue;
    for (int64_t e = 0; e < c.e; ++e) out[static_cast<size_t>(e)] += w * v.at({at[0], g, t, e});
  }
  for (double& x : out) x /= sum;
  return out;
}

Tensor make_mask(const Case& c, Mask kind, Type t, std::mt19937& rng) {
  const Dims shape = {c.b, c.h, c.s, c.t};
  if (kind == Mask::padding || kind == Mask::causal_padding) {
    Tensor m = Tensor::strided(Type::boolean, shape, {0, 1, 2, 3}, 0, {1, 2});
    return m.fill([&](int64_t i) { return i % c.t <= c.t / 2; });
  }
  if (kind == Mask::boolean) {
    Tensor m = Tensor::strided(Type::boolean, shape, {0, 1, 2, 3}, 0, {1});
    // The first row attends to nothing, the second to everything.
    return m.fill([&](int64_t i) {
      const int64_t s = i / c.t % c.s;
      return s == 0 ? 0.0 : s == 1 ? 1.0 : (i * 2654435761u >> 8) % 3 ? 1.0 : 0.0;
    });
  }
  if (kind == Mask::cache || kind == Mask::window) {
    // A static cache: what comes after a query's own position is empty; the first keys of each
    // batch are padding, or fall out of the window. Some rows of the second batch see nothing.
    Tensor m = Tensor::strided(Type::boolean, shape, {0, 1, 2, 3}, 0, {1});
    return m.fill([&](int64_t i) {
      const int64_t t = i % c.t, s = i / c.t % c.s, b = i / (c.t * c.s * c.h);
      const int64_t here = c.t * 2 / 3 + s - b * c.t;
      const bool late = kind == Mask::window ? t + c.t / 4 > here : t >= b + c.t / 8;
      return late && t <= here;
    });
  }
  if (kind == Mask::lowest) {
    // As transformers makes them: 0 or the lowest number; the first row hides every key.
    const double low = t == Type::f64 ? -1.7976931348623157e308 : -3.4028234663852886e38;
    Tensor m = Tensor::strided(t, shape, {0, 1, 2, 3}, 0, {1});
    return m.fill([&](int64_t i) {
      const int64_t at = i % c.t, s = i / c.t % c.s;
      return s > 0 && at >= c.t / 3 && at < c.t - c.t / 4 ? 0.0 : low;
    });
  }
  Tensor m = Tensor::strided(t, shape, {0, 1, 2, 3}, 1, {0});
  return m.normal(rng);
}

void check(const Case& c, Type type, Mask kind, std::mt19937& rng) {
  CAPTURE(name(type));
  CAPTURE(Dims({c.b, c.h, c.g, c.s, c.t, c.d, c.e}));
  CAPTURE(static_cast<int>(kind));
  Tensor q = Tensor::scrambled(type, {c.b, c.h, c.s, c.d}, rng);
  Tensor k = Tensor::scrambled(type, {c.b, c.g, c.t, c.d}, rng);
  // v as the model stores it: [B, T, G, E].
  Tensor v = Tensor::strided(type, {c.b, c.g, c.t, c.e}, {0, 2, 1, 3});
  Tensor o = Tensor::strided(type, {c.b, c.h, c.s, c.e}, {0, 2, 1, 3});
  q.normal(rng);
  k.normal(rng);
  v.normal(rng);
  const bool causal = kind == Mask::causal || kind == Mask::causal_padding;
  const bool masked = kind != Mask::none && kind != Mask::causal;
  Tensor mask = make_mask(c, kind, type == Type::f64 ? type : Type::f32, rng);
  const double scale = 0.3;
  Call call{"sdpa", {&q, &k, &v}, {&o}, {real("scale", scale), integer("is_causal", causal)}};
  call.inputs.push_back(masked ? &mask : nullptr);
  std::vector<double> want;
  for (int64_t i = 0; i < o.numel(); i += c.e) {
    const auto row =
        reference(c, q, k, v, masked ? &mask : nullptr, causal, scale, coordinates(i, o.shape()));
    want.insert(want.end(), row.begin(), row.end());
  }
  const double slack = type == Type::f64 ? 1e-12 : 4e-6 + 2 * epsilon(type);
  on_every_row(call, [&](const std::string&) {
    int bad = 0;
    for (int64_t i = 0; i < o.numel(); ++i) {
      bad += !close(o[i], want[static_cast<size_t>(i)],
                    2 * epsilon(type) + 1e-6 * (type != Type::f64), slack);
    }
    CHECK(bad == 0);
  });
}

}  // namespace

TEST_CASE("sdpa matches its definition for every mask, type and size class") {
  std::mt19937 rng(9);
  const std::vector<Case> cases = {
      {1, 1, 1, 1, 1, 1, 1},      {2, 4, 2, 7, 9, 16, 16},    {1, 3, 1, 5, 33, 20, 12},
      {1, 2, 2, 31, 31, 64, 64},  {2, 6, 3, 1, 300, 32, 48},  {1, 2, 2, 3, 17, 8, 5},
      {1, 1, 1, 40, 300, 24, 33}, {2, 4, 2, 1, 1100, 64, 64}, {2, 6, 2, 3, 700, 40, 20},
      {2, 2, 1, 50, 300, 8, 8},   {1, 4, 1, 4, 130, 40, 72},  {0, 2, 2, 4, 4, 8, 8},
      {1, 2, 2, 0, 4, 8, 8},      {1, 2, 2, 6, 0, 8, 8},      {1, 2, 2, 2, 0, 8, 8},
      {1, 1, 1, 6, 6, 0, 8}};
  for (const Case& c : cases) {
    for (Type t : kFloats) {
      for (Mask m : {Mask::none, Mask::causal, Mask::boolean, Mask::padding, Mask::additive,
                     Mask::causal_padding, Mask::cache, Mask::window, Mask::lowest}) {
        check(c, t, m, rng);
      }
    }
  }
}

// NaN behind the last attended key, finite numbers before the first.
TEST_CASE("sdpa takes any scale, large scores and masks that end rows anywhere") {
  std::mt19937 rng(15);
  for (Type type : {Type::f32, Type::bf16, Type::f16}) {
    for (double scale : {0.125, -0.125, 0.0, 8.0}) {
      for (auto [s, t, masked] : {std::tuple{70, 600, true}, {33, 257, true}, {40, 300, false}, {65, 31, false}}) {
        CAPTURE(name(type));
        CAPTURE(Dims({s, t, masked}));
        CAPTURE(scale);
        const Case c{1, 2, 1, s, t, 64, 48};
        Tensor q(type, {1, 2, s, 64}), k(type, {1, 1, t, 64}), v(type, {1, 1, t, 48}), o(type, {1, 2, s, 48});
        q.normal(rng), k.normal(rng), v.normal(rng);
        Tensor mask = Tensor::strided(Type::boolean, {1, 2, s, t}, {0, 1, 2, 3}, 0, {1});
        std::vector<int64_t> ends;
        for (int64_t i = 0; i < s; ++i) ends.push_back(i % 11 == 3 ? 0 : int64_t(rng() % uint64_t(t + 1)));
        mask.fill([&, keys = t](int64_t i) { return i % keys < ends[size_t(i / keys) % ends.size()]; });
        Call call{"sdpa", {&q, &k, &v, masked ? &mask : nullptr}, {&o}, {real("scale", scale)}};
        std::vector<double> want;
        for (int64_t i = 0; i < o.numel(); i += c.e) {
          const auto row = reference(c, q, k, v, masked ? &mask : nullptr, false, scale, coordinates(i, o.shape()));
          want.insert(want.end(), row.begin(), row.end());
        }
        // Scores are sums of 64 products in f32: an error of 2^-20 of the largest changes weights by e to it.
        const double slack = 2 * epsilon(type) * 3 + 4e-6 + 2e-5 * std::fabs(scale);
        on_every_row(call, [&](const std::string&) {
          int bad = 0;
          for (int64_t i = 0; i < o.numel(); ++i) bad += !close(o[i], want[size_t(i)], 2 * epsilon(type), slack);
          CHECK(bad == 0);
        });
      }
    }
  }
}

TEST_CASE("sdpa hides later keys at any scale, for few queries and many") {
  std::mt19937 rng(16);
  for (Type type : kFloats) {
    for (double scale : {0.125, -0.125, 0.0}) {
      for (auto [s, t] : {std::pair<int64_t, int64_t>{1, 9}, {3, 3}, {4, 300}, {5, 33}, {40, 300}}) {
        CAPTURE(name(type));
        CAPTURE(Dims({s, t}));
        CAPTURE(scale);
        const Case c{1, 2, 1, s, t, 24, 20};
        Tensor q(type, {1, 2, s, 24}), k(type, {1, 1, t, 24}), v(type, {1, 1, t, 20}), o(type, {1, 2, s, 20});
        q.normal(rng), k.normal(rng), v.normal(rng);
        Tensor mask(type, {1, 2, s, t});
        mask.normal(rng);
        for (const Tensor* m : {static_cast<const Tensor*>(nullptr), static_cast<const Tensor*>(&mask)}) {
          std::vector<double> want;
          for (int64_t i = 0; i < o.numel(); i += c.e) {
            const auto row = reference(c, q, k, v, m, true, scale, coordinates(i, o.shape()));
            want.insert(want.end(), row.begin(), row.end());
          }
          Call call{"sdpa", {&q, &k, &v, m}, {&o}, {real("scale", scale), integer("is_causal", 1)}};
          on_every_row(call, [&](const std::string& row) {
            INFO(row);
            int bad = 0;
            for (int64_t i = 0; i < o.numel(); ++i) {
              bad += !close(o[i], want[size_t(i)], 4 * epsilon(type), 6 * epsilon(type) + (type == Type::f64 ? 0 : 4e-6));
            }
            CHECK(bad == 0);
          });
        }
      }
    }
  }
}

TEST_CASE("sdpa reads float masks of every type, whatever type the operands have") {
  std::mt19937 rng(17);
  for (Type type : kFloats) {
    for (Type masks : kFloats) {
      for (int64_t s : {2, 9}) {
        CAPTURE(name(type));
        CAPTURE(name(masks));
        const Case c{1, 1, 1, s, 40, 8, 8};
        Tensor q(type, {1, 1, s, 8}), k(type, {1, 1, 40, 8}), v(type, {1, 1, 40, 8}), o(type, {1, 1, s, 8});
        q.normal(rng), k.normal(rng), v.normal(rng);
        Tensor mask(masks, {1, 1, s, 40});
        mask.normal(rng, 3);
        std::vector<double> want;
        for (int64_t i = 0; i < o.numel(); i += c.e) {
          const auto row = reference(c, q, k, v, &mask, false, 0.3, coordinates(i, o.shape()));
          want.insert(want.end(), row.begin(), row.end());
        }
        on_every_row({"sdpa", {&q, &k, &v, &mask}, {&o}, {real("scale", 0.3)}}, [&](const std::string& row) {
          INFO(row);
          int bad = 0;
          for (int64_t i = 0; i < o.numel(); ++i) bad += !close(o[i], want[size_t(i)], 4 * epsilon(type), 6 * epsilon(type) + 4e-6);
          CHECK(bad == 0);
        });
      }
    }
  }
}

TEST_CASE("sdpa never looks at keys and values behind what the mask attends to") {
  std::mt19937 rng(13);
  for (Type type : {Type::f32, Type::bf16, Type::f16}) {
    for (int64_t s : {1, 3, 40}) {
      const int64_t t = 700, first = 130, last = 405;  // attended: [first, last)
      Tensor q(type, {1, 4, s, 32}), k(type, {1, 2, t, 32}), v(type, {1, 2, t, 32}),
          o(type, {1, 4, s, 32});
      Tensor mask = Tensor::strided(Type::boolean, {1, 4, s, t}, {0, 1, 2, 3}, 0, {1});
      q.normal(rng);
      const auto inside = [&](int64_t i) { return i / 32 % t < last; };
      k.fill([&](int64_t i) { return inside(i) ? 0.01 * double(i % 7) : double(NAN); });
      v.fill([&](int64_t i) { return inside(i) ? double(i % 32) : double(NAN); });
      mask.fill([&](int64_t i) { return i % t >= first && i % t < last; });
      on_every_row({"sdpa", {&q, &k, &v, &mask}, {&o}, {}}, [&](const std::string& row) {
        INFO(row);
        int bad = 0;
        for (int64_t i = 0; i < o.numel(); ++i) {
          bad += !close(o[i], double(i % 32), 2 * epsilon(type) + 1e-5, 0);
        }
        CHECK(bad == 0);
      });
    }
  }
}

TEST_CASE("sdpa reads q, k and v as slices of one projection") {
  std::mt19937 rng(10);
  // [B, S, 3, H, D] seen as [B, H, S, D] three times: strides alone make the slices.
  const int64_t b = 2, s = 20, h = 3, d = 32;
  Tensor packed(Type::f32, {b, s, 3, h, d}), o(Type::f32, {b, h, s, d});
  packed.normal(rng);
  Tensor q(Type::f32, {b, h, s, d}), k(Type::f32, {b, h, s, d}), v(Type::f32, {b, h, s, d});
  int64_t part = 0;
  for (Tensor* t : {&q, &k, &v}) {
    t->fill([&](int64_t i) {
      const Dims at = coordinates(i, {b, h, s, d});
      return packed.at({at[0], at[2], part, at[1], at[3]});
    });
    ++part;
  }
  std::vector<double> want;
  on_every_row({"sdpa", {&q, &k, &v, nullptr}, {&o}, {real("scale", 0.2)}},
               [&](const std::string&) {
                 want.clear();
                 for (int64_t i = 0; i < o.numel(); ++i) want.push_back(o[i]);
               });
  int64_t shape[4] = {b, h, s, d}, strides[4] = {s * 3 * h * d, d, 3 * h * d, 1};
  for (const rm_kernel* row : rows("sdpa")) {
    rm_tensor view = q.view();
    view.shape = shape;
    view.strides = strides;
    const rm_tensor out = o.view();
    const rm_tensor* inputs[3] = {&view, &view, &view};
    const rm_tensor* outputs[1] = {&out};
    rm_attr scale{sizeof(rm_attr), {"scale", 5}, RM_ATTR_FLOAT, 0, 0, 0.2, {}, nullptr, nullptr, 0};
    const rm_problem problem{
        sizeof(rm_problem), {"sdpa", 4}, inputs, 3, outputs, 1, &scale, 1, sizeof(rm_attr), 0};
    rm_str why{};
    if (!row->supports(&problem, nullptr, &why)) continue;
    rm_kernel_state* state = nullptr;
    REQUIRE(row->prepare(&problem, nullptr, 0, &state) == nullptr);
    std::vector<char> workspace(row->workspace(state) + 64);
    auto aligned = (reinterpret_cast<uintptr_t>(workspace.data()) + 63) & ~uintptr_t{63};
    const auto* base = static_cast<const float*>(packed.data());
    const void* in[3] = {base, base + h * d, base + 2 * h * d};
    void* to[1] = {o.data()};
    o.fill([](int64_t) { return 7; });
    const rm_launch launch{
        sizeof(rm_launch), state, in, to, reinterpret_cast<void*>(aligned), nullptr};
    REQUIRE(row->launch(&launch) == nullptr);
    row->release(state);
    int bad = 0;
    for (int64_t i = 0; i < o.numel(); ++i)
      bad += !close(o[i], want[static_cast<size_t>(i)], 1e-5, 1e-6);
    CHECK(bad == 0);
  }
}

TEST_CASE("sdpa passes NaN of an attended key on and ignores masked keys") {
  for (int64_t s : {1, 8}) {
    Tensor q(Type::f32, {1, 1, s, 16}), k(Type::f32, {1, 1, 20, 16}), v(Type::f32, {1, 1, 20, 16}),
        o(Type::f32, {1, 1, s, 16}), mask(Type::boolean, {1, 1, s, 20});
    q.fill([](int64_t i) { return 0.01 * static_cast<double>(i % 7); });
    k.fill([](int64_t i) { return 0.02 * static_cast<double>(i % 5); });
    v.fill([](int64_t i) { return i / 16 == 3 ? static_cast<double>(NAN) : 1.0; });
    mask.fill([](int64_t i) { return i % 20 != 19; });
    on_every_row({"sdpa", {&q, &k, &v, &mask}, {&o}, {}}, [&](const std::string&) {
      for (int64_t i = 0; i < o.numel(); ++i) CHECK(std::isnan(o[i]));
    });
    v.fill([](int64_t) { return 1.0; });
    on_every_row({"sdpa", {&q, &k, &v, &mask}, {&o}, {}}, [&](const std::string&) {
      for (int64_t i = 0; i < o.numel(); ++i) CHECK(close(o[i], 1.0, 1e-6, 0));
    });
  }
}

TEST_CASE("a query's result has the same bits whatever other queries there are") {
  std::mt19937 rng(14);
  for (Type type : {Type::f32, Type::bf16, Type::f16}) {
    const int64_t t = 600, d = 40, most = 75;
    Tensor all(type, {1, 2, most, d}), k(type, {1, 2, t, d}), v(type, {1, 2, t, d});
    Tensor mask(Type::boolean, {1, 2, most, t});
    all.normal(rng), k.normal(rng), v.normal(rng);
    mask.fill([&](int64_t i) { return (i * 2654435761u >> 8) % 4 ? 1.0 : 0.0; });
    for (const rm_kernel* row : rows("sdpa")) {
      Tensor whole(type, {1, 2, most, d});
      const Call call{"sdpa", {&all, &k, &v, &mask}, {&whole}, {}};
      if (!supports(*row, call)) continue;
      CAPTURE(std::string(row->name.data, row->name.size));
      REQUIRE(run(*row, call).code == RM_OK);
      for (int64_t s : {5, 16, 17, 32, 33, 48, 74}) {
        Tensor q(type, {1, 2, s, d}), o(type, {1, 2, s, d}), m(Type::boolean, {1, 2, s, t});
        q.fill([&](int64_t i) { return all[i / (s * d) * most * d + i % (s * d)]; });
        m.fill([&](int64_t i) { return mask[i / (s * t) * most * t + i % (s * t)]; });
        REQUIRE(run(*row, {"sdpa", {&q, &k, &v, &m}, {&o}, {}}).code == RM_OK);
        int differ = 0;
        for (int64_t i = 0; i < o.numel(); ++i) {
          differ += o[i] != whole[i / (s * d) * most * d + i % (s * d)];
        }
        CAPTURE(s);
        CHECK(differ == 0);
      }
    }
  }
}

TEST_CASE("sdpa gives the same bits on any number of threads") {
  std::mt19937 rng(12);
  for (const auto& [s, type] : {std::pair{int64_t{1}, Type::f32}, {int64_t{64}, Type::f32},
                                {int64_t{1}, Type::bf16}, {int64_t{64}, Type::bf16}}) {
    Tensor q(type, {1, 4, s, 64}), k(type, {1, 2, 900, 64}), v(type, {1, 2, 900, 64}),
        o(type, {1, 4, s, 64});
    q.normal(rng);
    k.normal(rng);
    v.normal(rng);
    const int threads = omp_get_max_threads();
    for (const rm_kernel* row : rows("sdpa")) {
      const Call call{"sdpa", {&q, &k, &v, nullptr}, {&o}, {}};
      if (!supports(*row, call)) continue;
      std::vector<double> first;
      for (int n : {1, 2, 3}) {
        omp_set_num_threads(n);
        REQUIRE(run(*row, call).code == RM_OK);
        int differ = 0;
        for (int64_t i = 0; i < o.numel(); ++i) {
          if (n == 1) first.push_back(o[i]);
          differ += o[i] != first[static_cast<size_t>(i)];
        }
        CHECK(differ == 0);
      }
    }
    omp_set_num_threads(threads);
  }
}
