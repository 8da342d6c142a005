// View algebra against index arithmetic done the slow way.
#include <doctest/doctest.h>

#include <random>

#include "base/error.hpp"
#include "ir/layout.hpp"

using namespace rm::ir;

namespace {

// Offsets of all elements in row-major order: two layouts of the same elements agree on this list.
Ints offsets(const Layout& l) {
  Ints out{l.offset};
  for (size_t a = 0; a < l.dims.size(); ++a) {
    Ints next;
    for (int64_t base : out) {
      for (int64_t i = 0; i < l.dims[a]; ++i) next.push_back(base + i * l.strides[a]);
    }
    out = std::move(next);
  }
  return out;
}

Layout random_view(std::mt19937& rng) {
  Layout l = contiguous(DType::kF32, {static_cast<int64_t>(1 + rng() % 4),
                                      static_cast<int64_t>(1 + rng() % 4),
                                      static_cast<int64_t>(2 + rng() % 5)});
  for (int step = 0; step < 3; ++step) {
    if (rng() % 2 == 0) {
      Ints axes{0, 1, 2};
      std::shuffle(axes.begin(), axes.end(), rng);
      l = view_permute(l, axes);
    } else {
      size_t axis = rng() % 3;
      int64_t start = static_cast<int64_t>(rng()) % (l.dims[axis] + 1);
      l = view_slice(l, axis, std::min(start, l.dims[axis] - 1), l.dims[axis],
                     1 + static_cast<int64_t>(rng() % 2));
    }
  }
  return l;
}

}  // namespace

TEST_CASE("a reshape view visits the same elements in the same order") {
  std::mt19937 rng(3);
  int views = 0, refusals = 0;
  for (int round = 0; round < 3000; ++round) {
    Layout l = random_view(rng);
    int64_t n = l.num_elements();
    Ints dims;
    for (int64_t rest = n; rest > 1;) {
      int64_t d = 2 + static_cast<int64_t>(rng() % static_cast<uint64_t>(rest));
      while (d > rest || rest % d != 0) --d;
      dims.push_back(d == 0 ? 1 : d);
      rest /= dims.back();
      if (dims.back() == 1) break;
    }
    int64_t product = 1;
    for (int64_t d : dims) product *= d;
    if (product != n) dims.push_back(n / product);
    if (rng() % 3 == 0) dims.insert(dims.begin() + static_cast<std::ptrdiff_t>(rng() % (dims.size() + 1)), 1);
    auto view = view_reshape(l, dims);
    if (view) {
      CHECK(offsets(*view) == offsets(l));
      ++views;
    } else {
      CHECK(!l.is_contiguous());
      ++refusals;
    }
  }
  CHECK(views > 500);
  CHECK(refusals > 100);
}

TEST_CASE("expanding gives stride zero and refuses what does not broadcast") {
  Layout l = contiguous(DType::kF32, {3, 1});
  Layout e = view_expand(l, {2, 3, 4});
  CHECK(e.strides == Ints{0, 1, 0});
  CHECK_THROWS_AS(view_expand(l, {2, 4, 4}), rm::Error);
  CHECK_THROWS_AS(view_slice(l, 0, 2, 1, 1), rm::Error);
  CHECK_THROWS_AS(view_slice(l, 0, 0, 4, 1), rm::Error);
}
