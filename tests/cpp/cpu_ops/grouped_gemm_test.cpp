// grouped_gemm on every row against sums in double: groups of any size, layouts, types, offsets that
// are wrong, and what a row gives whatever stands beside it.
#include <doctest/doctest.h>
#include <omp.h>

#include <cmath>

#include "harness.hpp"

using namespace rm::test;

namespace {

struct Experts {
  std::vector<int64_t> ends;
  int64_t rows, k, n;
  Type type = Type::f32;
  bool turned = false, scrambled = false;  // turned: the matrices lie as [E,N,K]
  Type offsets = Type::i32;
};

/// Operands, the result, and the call over them.
struct Given {
  Tensor x, w, offsets, y;
  Call call;

  Given(const Experts& e, std::mt19937& rng)
      : x(e.scrambled ? Tensor::scrambled(e.type, {e.rows, e.k}, rng) : Tensor(e.type, {e.rows, e.k})),
        w(Tensor::strided(e.type, {static_cast<int64_t>(e.ends.size()), e.k, e.n},
                          e.turned ? std::vector<int>{0, 2, 1} : std::vector<int>{0, 1, 2},
                          e.scrambled ? 3 : 0)),
        offsets(e.offsets, {static_cast<int64_t>(e.ends.size())}),
        y(e.scrambled ? Tensor::scrambled(e.type, {e.rows, e.n}, rng) : Tensor(e.type, {e.rows, e.n})) {
    x.normal(rng, 0.5);
    w.normal(rng, 0.5);
    offsets.fill([&](int64_t i) { return static_cast<double>(e.ends[static_cast<size_t>(i)]); });
    call = {"grouped_gemm", {&x, &w, &offsets}, {&y}, {}};
  }
};

/// The group of a row, or as many as there are where it is behind the last.
size_t group_of(const Experts& e, int64_t row) {
  size_t group = 0;
  while (group < e.ends.size() && e.ends[group] <= row) ++group;
  return group;
}

void check(const Experts& e, std::mt19937& rng) {
  Given given(e, rng);
  CAPTURE(e.rows);
  CAPTURE(e.k);
  CAPTURE(e.n);
  CAPTURE(name(e.type));
  CAPTURE(e.turned);
  CAPTURE(e.scrambled);
  CAPTURE(e.ends.size());
  std::vector<double> want, sizes;
  for (int64_t i = 0; i < e.rows; ++i) {
    const auto group = static_cast<int64_t>(group_of(e, i));
    for (int64_t j = 0; j < e.n; ++j) {
      double sum = 0, size = 0;
      for (int64_t p = 0; p < e.k && group < static_cast<int64_t>(e.ends.size()); ++p) {
        const double term = given.x.at({i, p}) * given.w.at({group, p, j});
        sum += term, size += std::abs(term);
      }
      want.push_back(sum), sizes.push_back(size);
    }
  }
  const double single = e.type == Type::f64 ? 1e-13 : 1e-6;
  on_every_row(given.call, [&](const std::string& row) {
    CAPTURE(row);
    int64_t bad = 0;
    for (int64_t i = 0; i < given.y.numel(); ++i) {
      const auto at = static_cast<size_t>(i);
      bad += close(given.y[i], want[at], 2 * epsilon(e.type), single * (1 + sizes[at])) ? 0 : 1;
    }
    CHECK(bad == 0);
  });
}

}  // namespace

TEST_CASE("rows meet the matrix of their group, whatever the sizes of groups") {
  std::mt19937 rng(26);
  for (Type t : kFloats) {
    for (bool turned : {false, true}) {
      check({{3, 3, 10, 40}, 40, 33, 50, t, turned}, rng);            // one is empty
      check({{0, 0, 23}, 23, 64, 64, t, turned}, rng);                // all rows in the last
      check({{23, 23, 23}, 23, 64, 64, t, turned, false, Type::i64}, rng);  // and in the first
      check({{5}, 5, 17, 9, t, turned}, rng);                         // one group
      check({{1, 4, 6}, 9, 20, 33, t, turned}, rng);                  // rows behind the last
      check({{0, 0}, 7, 20, 33, t, turned}, rng);                     // no group has rows
      check({{2, 5, 5, 7}, 7, 29, 41, t, turned, true, Type::i64}, rng);
      check({{2, 5, 5, 7}, 7, 29, 41, t, turned, true}, rng);
    }
  }
  // More rows than a kernel is given at a time, and around that.
  for (int64_t rows : {31, 32, 33, 255, 256, 257, 600}) {
    check({{rows, rows + 2}, rows + 3, 40, 36, Type::f32, true}, rng);
    check({{rows, rows + 2}, rows + 3, 40, 36, Type::bf16, true}, rng);
    check({{rows, rows + 2}, rows + 3, 40, 36, Type::f32}, rng);
  }
}

TEST_CASE("sizes of nothing: no rows, no columns, nothing to sum, no groups") {
  std::mt19937 rng(27);
  check({{0, 0}, 0, 8, 40}, rng);
  check({{1, 2}, 2, 8, 0}, rng);
  check({{1, 2}, 3, 0, 40}, rng);
  check({{}, 3, 8, 40}, rng);
}

TEST_CASE("offsets that fall, are negative or end behind the rows are refused, and say where") {
  std::mt19937 rng(28);
  for (Type type : {Type::i32, Type::i64}) {
    const std::vector<std::vector<int64_t>> wrong = {
        {3, 2, 6}, {-1, 2, 6}, {2, 4, 7}, {6, 6, -6}, {2147483647, 2, 6}, {0, 0, -2147483647}};
    for (const auto& ends : wrong) {
      Given given({ends, 6, 16, 40, Type::f32, true, false, type}, rng);
      int taken = 0;
      for (const rm_kernel* row : rows("grouped_gemm")) {
        if (!supports(*row, given.call)) continue;
        ++taken;
        const Outcome outcome = run(*row, given.call);
        CHECK(outcome.code == RM_OUT_OF_RANGE);
        CHECK(outcome.message.find("[grouped_gemm] expected offsets that do not fall") == 0);
      }
      CHECK(taken > 0);
    }
  }
}

TEST_CASE("a row gives the same bits whatever the group and the threads") {
  std::mt19937 rng(29);
  for (Type type : {Type::f32, Type::bf16}) {
    for (bool turned : {false, true}) {
      const Experts many{{1, 90, 90, 300}, 300, 130, 96, type, turned};
      Given given(many, rng);
      for (const rm_kernel* row : rows("grouped_gemm")) {
        if (!supports(*row, given.call)) continue;
        CAPTURE(std::string(row->name.data, row->name.size));
        const int threads = omp_get_max_threads();
        std::vector<double> first;
        for (int count : {1, 2, 3}) {
          omp_set_num_threads(count);
          REQUIRE(run(*row, given.call).code == RM_OK);
          int64_t differing = 0;
          for (int64_t i = 0; i < given.y.numel(); ++i) {
            if (count == 1) first.push_back(given.y[i]);
            differing += given.y[i] == first[static_cast<size_t>(i)] ? 0 : 1;
          }
          CHECK(differing == 0);
        }
        omp_set_num_threads(threads);
        // The last row alone in its group.
        given.offsets.set(2, 299);
        given.offsets.set(1, 1);
        given.w.fill([](int64_t i) { return std::sin(static_cast<double>(i)); });
        REQUIRE(run(*row, given.call).code == RM_OK);
        std::vector<double> alone;
        for (int64_t j = 0; j < 96; ++j) alone.push_back(given.y[299 * 96 + j]);
        given.offsets.set(2, 1);
        REQUIRE(run(*row, given.call).code == RM_OK);
        int64_t differing = 0;
        for (int64_t j = 0; j < 96; ++j) differing += alone[static_cast<size_t>(j)] == given.y[299 * 96 + j] ? 0 : 1;
        CHECK(differing == 0);
        given.offsets.set(2, 90);
        given.offsets.set(1, 90);
      }
    }
  }
}
