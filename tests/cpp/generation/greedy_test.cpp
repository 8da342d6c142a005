// argmax against the definition, ties and NaN included; the loop is tested through generate.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <random>

#include "generation/greedy_loop.hpp"
#include "ir/scalar.hpp"

using namespace rm;

TEST_CASE("argmax gives the first largest element, and the first NaN when there is one") {
  std::mt19937 rng(3);
  const double inf = std::numeric_limits<double>::infinity();
  for (ir::DType type : {ir::DType::kF32, ir::DType::kBF16, ir::DType::kF16}) {
    const size_t item = ir::size_bytes(type);
    for (int64_t count : {1, 2, 15, 16, 17, 511, 512, 513, 1500}) {
      for (int special = 0; special < 6; ++special) {
        std::vector<char> bytes(static_cast<size_t>(count) * item);
        for (int64_t i = 0; i < count; ++i) {
          double value = special == 4 ? -inf : static_cast<double>(rng() % 40) - 20;
          if (special == 5) value = rng() % 2 != 0 ? 0.0 : -0.0;  // zeros are equal
          ir::store_element(type, bytes.data() + static_cast<size_t>(i) * item, value);
        }
        auto put = [&](double value) {
          ir::store_element(type, bytes.data() + rng() % static_cast<uint64_t>(count) * item,
                            value);
        };
        if (special == 1 || special == 3) put(std::nan("")), put(std::nan(""));
        if (special == 2 || special == 3) put(inf), put(-inf);
        int64_t want = 0;
        auto at = [&](int64_t i) {
          return ir::load_element(type, bytes.data() + static_cast<size_t>(i) * item);
        };
        for (int64_t i = 1; i < count && !std::isnan(at(want)); ++i) {
          if (at(i) > at(want) || std::isnan(at(i))) want = i;
        }
        CHECK(generation::argmax(type, bytes.data(), count) == want);
      }
    }
  }
}
