// copy, embedding, gather, index, scatter, sort and cumsum: exact results, checked indices.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "harness.hpp"

using namespace rm::test;

namespace {

const std::vector<Dims> kShapes = {{},     {1},      {0, 2},     {5},
                                   {3, 4}, {17, 33}, {2, 3, 19}, {2, 1, 5, 16}};

void every_row_says(const Call& call, rm_code code) {
  for (const rm_kernel* row : rows(call.op)) {
    if (supports(*row, call)) CHECK(run(*row, call).code == code);
  }
}

}  // namespace

TEST_CASE("copy keeps every element for any pair of layouts") {
  std::mt19937 rng(1);
  for (Type t : kAll) {
    for (const Dims& shape : kShapes) {
      for (int repeat = 0; repeat < 3; ++repeat) {
        CAPTURE(name(t));
        CAPTURE(shape);
        Tensor x = Tensor::scrambled(t, shape, rng), y = Tensor::scrambled(t, shape, rng);
        x.normal(rng);
        on_every_row({"copy", {&x}, {&y}, {}}, [&](const std::string&) {
          for (int64_t i = 0; i < x.numel(); ++i) REQUIRE(y[i] == x[i]);
        });
      }
    }
  }
}

TEST_CASE("copy expands broadcast sources and transposes large matrices") {
  std::mt19937 rng(2);
  Tensor x = Tensor::strided(Type::f32, {70, 50}, {0, 1}, 0, {0});
  Tensor y(Type::f32, {70, 50});
  x.normal(rng);
  on_every_row({"copy", {&x}, {&y}, {}}, [&](const std::string&) {
    for (int64_t i = 0; i < x.numel(); ++i) REQUIRE(y[i] == x[i]);
  });
  Tensor a = Tensor::strided(Type::bf16, {500, 300}, {1, 0}, 3), b(Type::bf16, {500, 300});
  a.normal(rng);
  on_every_row({"copy", {&a}, {&b}, {}}, [&](const std::string&) {
    int bad = 0;
    for (int64_t i = 0; i < a.numel(); ++i) bad += b[i] != a[i];
    CHECK(bad == 0);
  });
}

TEST_CASE("embedding copies rows for both id types and refuses ids outside the table") {
  std::mt19937 rng(3);
  for (Type t : kAll) {
    for (Type ids : {Type::i64, Type::i32}) {
      Tensor table = Tensor::scrambled(t, {9, 21}, rng), y = Tensor::scrambled(t, {4, 3, 21}, rng);
      Tensor id = Tensor::scrambled(ids, {4, 3}, rng);
      table.normal(rng);
      id.integers(rng, 0, 8);
      on_every_row({"embedding", {&table, &id}, {&y}, {}}, [&](const std::string&) {
        for (int64_t i = 0; i < y.numel(); ++i) {
          REQUIRE(y[i] == table.at({static_cast<int64_t>(id[i / 21]), i % 21}));
        }
      });
      for (double wrong : {-1.0, 9.0}) {
        id.set(5, wrong);
        every_row_says({"embedding", {&table, &id}, {&y}, {}}, RM_OUT_OF_RANGE);
      }
    }
  }
}

TEST_CASE("gather picks along an axis and refuses negative and too large indices") {
  std::mt19937 rng(4);
  for (Type t : kAll) {
    for (int64_t axis : {0, 1, 2, -1}) {
      const size_t at = static_cast<size_t>(axis < 0 ? axis + 3 : axis);
      const Dims shape = {4, 5, 6};
      Dims picked = {3, 4, 5};
      picked[at] = 11;
      Tensor x = Tensor::scrambled(t, shape, rng), y = Tensor::scrambled(t, picked, rng);
      Tensor index = Tensor::scrambled(rng() % 2 ? Type::i64 : Type::i32, picked, rng);
      x.normal(rng);
      index.integers(rng, 0, shape[at] - 1);
      on_every_row({"gather", {&x, &index}, {&y}, {integer("axis", axis)}},
                   [&](const std::string&) {
                     for (int64_t i = 0; i < y.numel(); ++i) {
                       Dims where = coordinates(i, picked);
                       where[at] = static_cast<int64_t>(index[i]);
                       REQUIRE(y[i] == x.at(where));
                     }
                   });
      for (double wrong : {-1.0, static_cast<double>(shape[at])}) {
        index.set(7, wrong);
        every_row_says({"gather", {&x, &index}, {&y}, {integer("axis", axis)}}, RM_OUT_OF_RANGE);
      }
    }
  }
}

TEST_CASE("index takes several consecutive axes and counts negative indices from the end") {
  std::mt19937 rng(5);
  for (Type t : kAll) {
    for (const Dims& where : {Dims{}, Dims{4}, Dims{2, 3}}) {
      Tensor x = Tensor::scrambled(t, {3, 5, 7, 4}, rng);
      x.normal(rng);
      Tensor i = Tensor::scrambled(Type::i64, where, rng),
             j = Tensor::scrambled(Type::i32, where, rng);
      i.integers(rng, -5, 4);
      j.integers(rng, -7, 6);
      Dims shape = {3};
      shape.insert(shape.end(), where.begin(), where.end());
      shape.push_back(4);
      Tensor y = Tensor::scrambled(t, shape, rng);
      const Call call{"index", {&x, &i, &j}, {&y}, {integers("axes", {1, 2})}};
      on_every_row(call, [&](const std::string&) {
        const int64_t positions = i.numel();
        for (int64_t n = 0; n < y.numel(); ++n) {
          const int64_t p = n / 4 % positions;
          const auto a = static_cast<int64_t>(i[p]), b = static_cast<int64_t>(j[p]);
          REQUIRE(y[n] == x.at({n / 4 / positions, a < 0 ? a + 5 : a, b < 0 ? b + 7 : b, n % 4}));
        }
      });
      for (double wrong : {-8.0, 7.0}) {
        j.set(0, wrong);
        every_row_says(call, RM_OUT_OF_RANGE);
      }
    }
  }
}

TEST_CASE("scatter writes and adds, equal indices included, and checks before it writes") {
  std::mt19937 rng(6);
  for (Type t : kAll) {
    for (const char* kind : {"set", "add"}) {
      const bool add = std::string(kind) == "add";
      Tensor x = Tensor::scrambled(t, {6, 5}, rng), y = Tensor::scrambled(t, {6, 5}, rng);
      Tensor src = Tensor::scrambled(t, {9, 4}, rng),
             index = Tensor::scrambled(Type::i64, {9, 4}, rng);
      x.integers(rng, 0, 3);
      src.integers(rng, 0, 3);
      index.integers(rng, 0, 5);
      const Call call{
          "scatter", {&x, &index, &src}, {&y}, {integer("axis", 0), text("kind", kind)}};
      on_every_row(call, [&](const std::string&) {
        std::vector<double> want;
        for (int64_t i = 0; i < x.numel(); ++i) want.push_back(x[i]);
        for (int64_t i = 0; i < src.numel(); ++i) {
          double& to = want[static_cast<size_t>(static_cast<int64_t>(index[i]) * 5 + i % 4)];
          to = !add ? src[i] : t == Type::boolean ? (to + src[i] != 0) : to + src[i];
        }
        for (int64_t i = 0; i < y.numel(); ++i) REQUIRE(y[i] == want[static_cast<size_t>(i)]);
      });
      for (double wrong : {-1.0, 6.0}) {
        index.set(35, wrong);
        y.fill([](int64_t) { return 1; });
        every_row_says(call, RM_OUT_OF_RANGE);
        for (int64_t i = 0; i < y.numel(); ++i) CHECK(y[i] == 1);
      }
    }
  }
}

TEST_CASE("index_copy writes whole slices along any axis, keeps the rest, and checks first") {
  std::mt19937 rng(16);
  const std::vector<int64_t> full{3, 4, 5, 6};
  for (Type t : kAll) {
    for (int64_t axis : {0, 1, 2, 3}) {
      for (int64_t n : {0, 1, 2}) {
        std::vector<int64_t> part = full;
        part[static_cast<size_t>(axis)] = n;
        Tensor y = Tensor::scrambled(t, full, rng), src = Tensor::scrambled(t, part, rng);
        Tensor index = Tensor::scrambled(n == 2 ? Type::i32 : Type::i64, {n}, rng);
        src.integers(rng, 0, 3);
        for (int64_t i = 0; i < n; ++i) index.set(i, double(full[static_cast<size_t>(axis)] - 1 - i));
        const Call call{"index_copy", {&index, &src}, {&y}, {integer("axis", axis)}};
        int64_t inner = 1;
        for (size_t d = static_cast<size_t>(axis) + 1; d < 4; ++d) inner *= full[d];
        const int64_t size = full[static_cast<size_t>(axis)];
        on_every_row(call, [&](const std::string&) {
          for (int64_t i = 0; i < y.numel(); ++i) {
            const int64_t at = i / inner % size, from = size - 1 - at;  // the slice written there
            const int64_t outer = i / (inner * size);
            const double kept = t == Type::boolean ? 1 : 77;
            REQUIRE(y[i] == (from < n ? src[(outer * n + from) * inner + i % inner] : kept));
          }
        });
        if (n == 0) continue;
        y.fill([](int64_t) { return 1; });
        for (double wrong : {-1.0, double(size)}) {
          index.set(n - 1, wrong);
          every_row_says(call, RM_OUT_OF_RANGE);
          for (int64_t i = 0; i < y.numel(); ++i) REQUIRE(y[i] == 1);
        }
      }
    }
  }
}

TEST_CASE("sort is stable in both directions, puts NaN last going up, and can stop after k") {
  std::mt19937 rng(7);
  for (Type t : kAll) {
    for (bool descending : {false, true}) {
      for (int64_t k : {-1, 1, 7, 40}) {
        CAPTURE(name(t));
        CAPTURE(descending);
        CAPTURE(k);
        const int64_t n = 40, kept = k < 0 ? n : k;
        Tensor x = Tensor::scrambled(t, {3, n, 2}, rng);
        x.integers(rng, 0, 9);
        if (is_float(t)) {
          x.set(10, NAN);
          x.set(31, NAN);
          x.set(5, -INFINITY);
        }
        Tensor values = Tensor::scrambled(t, {3, kept, 2}, rng);
        Tensor indices = Tensor::scrambled(Type::i64, {3, kept, 2}, rng);
        on_every_row({"sort",
                      {&x},
                      {&values, &indices},
                      {integer("axis", 1), integer("descending", descending), integer("k", k)}},
                     [&](const std::string&) {
                       for (int64_t line = 0; line < 6; ++line) {
                         std::vector<int64_t> order(static_cast<size_t>(n));
                         std::iota(order.begin(), order.end(), 0);
                         const auto key = [&](int64_t i) { return x.at({line / 2, i, line % 2}); };
                         std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
                           const double va = descending ? key(b) : key(a),
                                        vb = descending ? key(a) : key(b);
                           if (std::isnan(va) || std::isnan(vb)) return !std::isnan(va);
                           return va < vb;
                         });
                         for (int64_t i = 0; i < kept; ++i) {
                           const Dims at = {line / 2, i, line % 2};
                           const int64_t from = order[static_cast<size_t>(i)];
                           REQUIRE(indices.at(at) == static_cast<double>(from));
                           REQUIRE(close(values.at(at), key(from), 0, 0));
                         }
                       }
                     });
      }
    }
  }
}

TEST_CASE("long lines sort as short ones do: both zeros are equal, signs and NaN in place") {
  std::mt19937 rng(17);
  for (Type t : kAll) {
    for (int64_t n : {511, 512, 3000}) {
      for (bool descending : {false, true}) {
        for (int64_t k : {n, n - 1, n / 4, int64_t{3}}) {
          CAPTURE(name(t));
          CAPTURE(n);
          CAPTURE(descending);
          CAPTURE(k);
          const bool with_sign = is_float(t) || t == Type::i64 || t == Type::i32;
          Tensor x = Tensor::scrambled(t, {2, n}, rng);
          x.integers(rng, with_sign ? -100 : 0, t == Type::boolean ? 1 : 100);
          if (is_float(t)) {
            x.set(n / 2, NAN);
            x.set(7, -NAN);
            x.set(9, INFINITY);
            x.set(3, -INFINITY);
            for (int64_t i = 20; i < 60; ++i) x.set(i, i % 3 == 0 ? -0.0 : 0.0);
          }
          Tensor values = Tensor::scrambled(t, {2, k}, rng);
          Tensor indices = Tensor::scrambled(Type::i64, {2, k}, rng);
          on_every_row(
              {"sort",
               {&x},
               {&values, &indices},
               {integer("axis", 1), integer("descending", descending), integer("k", k)}},
              [&](const std::string&) {
                for (int64_t line = 0; line < 2; ++line) {
                  std::vector<int64_t> order(static_cast<size_t>(n));
                  std::iota(order.begin(), order.end(), 0);
                  const auto rank = [&](int64_t i) {
                    const double v = x.at({line, i});
                    return std::pair(std::isnan(v), std::isnan(v) ? 0.0 : v);
                  };
                  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
                    return descending ? rank(b) < rank(a) : rank(a) < rank(b);
                  });
                  for (int64_t i = 0; i < k; ++i) {
                    const int64_t from = order[static_cast<size_t>(i)];
                    REQUIRE(indices.at({line, i}) == static_cast<double>(from));
                    REQUIRE(close(values.at({line, i}), x.at({line, from}), 0, 0));
                  }
                }
              });
        }
      }
    }
  }
}

TEST_CASE("cumsum keeps running sums along any axis") {
  std::mt19937 rng(8);
  for (Type t : kAll) {
    for (int64_t axis : {0, 1, -1}) {
      const Type out = is_float(t) ? t : Type::i64;
      Tensor x = Tensor::scrambled(t, {4, 7, 5}, rng), y = Tensor::scrambled(out, {4, 7, 5}, rng);
      x.integers(rng, 0, 3);
      const size_t at = static_cast<size_t>(axis < 0 ? 2 : axis);
      on_every_row({"cumsum", {&x}, {&y}, {integer("axis", axis)}}, [&](const std::string&) {
        for (int64_t i = 0; i < y.numel(); ++i) {
          Dims where = coordinates(i, y.shape());
          double sum = 0;
          for (; where[at] >= 0; --where[at]) sum += x.at(where);
          REQUIRE(y[i] == sum);
        }
      });
    }
  }
}
