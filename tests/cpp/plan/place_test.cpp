// The search for offsets: exact on small problems, and good on those that can be packed without a gap.
#include "plan/place.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>

using namespace rm::plan;

namespace {

Block block(int64_t bytes, int32_t first, int32_t last) { return {bytes, first, last, 0, -1}; }

bool meet(const Block& a, const Block& b) { return a.first <= b.last && b.first <= a.last; }

int64_t end_of(const std::vector<Block>& blocks) {
  int64_t end = 0;
  for (const Block& b : blocks) end = std::max(end, b.offset + b.bytes);
  return end;
}

bool apart(const std::vector<Block>& blocks) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      const Block &a = blocks[i], &b = blocks[j];
      const bool above = a.offset >= b.offset + b.bytes || b.offset >= a.offset + a.bytes;
      if (a.offset < 0 || (meet(a, b) && !above)) return false;
    }
  }
  return true;
}

// The smallest arena over all orders in which blocks are put on what is below them.
int64_t by_all_orders(std::vector<Block> blocks) {
  std::vector<size_t> order(blocks.size());
  std::iota(order.begin(), order.end(), size_t{0});
  int64_t best = INT64_MAX;
  do {
    for (size_t k = 0; k < order.size(); ++k) {
      Block& b = blocks[order[k]];
      b.offset = 0;
      for (size_t j = 0; j < k; ++j) {
        const Block& other = blocks[order[j]];
        if (meet(b, other)) b.offset = std::max(b.offset, other.offset + other.bytes);
      }
    }
    best = std::min(best, end_of(blocks));
  } while (std::next_permutation(order.begin(), order.end()));
  return best;
}

// Cuts the rectangle of all steps and all bytes into blocks: at least one placement has no gap.
void cut(std::mt19937& rng, int64_t bytes, int32_t first, int32_t last, int depth,
         std::vector<Block>& out) {
  const bool in_time = rng() % 2 == 0;
  if (depth == 0 || (in_time ? last == first : bytes < 2)) {
    out.push_back(block(bytes, first, last));
  } else if (in_time) {
    const auto at = first + static_cast<int32_t>(rng() % static_cast<uint32_t>(last - first));
    cut(rng, bytes, first, at, depth - 1, out);
    cut(rng, bytes, at + 1, last, depth - 1, out);
  } else {
    const auto part = 1 + static_cast<int64_t>(rng() % static_cast<uint64_t>(bytes - 1));
    cut(rng, part, first, last, depth - 1, out);
    cut(rng, bytes - part, first, last, depth - 1, out);
  }
}

}  // namespace

TEST_CASE("a placement is found exactly when there is one") {
  std::mt19937 rng(7);
  for (int round = 0; round < 60; ++round) {
    std::vector<Block> blocks;
    for (int i = 0; i < 7; ++i) {
      const auto first = static_cast<int32_t>(rng() % 8);
      blocks.push_back(block(1 + static_cast<int64_t>(rng() % 6), first,
                             first + static_cast<int32_t>(rng() % 4)));
    }
    const int64_t best = by_all_orders(blocks);
    CHECK_FALSE(place_within(blocks, best - 1, 1'000'000));
    CHECK(blocks[0].offset == -1);
    REQUIRE(place_within(blocks, best, 1'000'000));
    CHECK(end_of(blocks) == best);
    CHECK(apart(blocks));
  }
}

TEST_CASE("more may be needed than is alive at once") {
  std::vector<Block> blocks{block(3, 1, 2), block(3, 4, 6), block(2, 3, 4), block(2, 2, 3),
                            block(2, 2, 4), block(3, 1, 1), block(3, 5, 6)};
  CHECK_FALSE(place_within(blocks, 7, 1'000'000));  // alive at once: 7
  CHECK(place_within(blocks, 8, 1'000'000));
  CHECK(apart(blocks));
}

TEST_CASE("what can be packed without a gap is packed nearly so") {
  std::mt19937 rng(11);
  for (int round = 0; round < 20; ++round) {
    std::vector<Block> blocks;
    cut(rng, 1'000'000, 0, 200, 4 + round % 3, blocks);
    std::shuffle(blocks.begin(), blocks.end(), rng);
    CAPTURE(blocks.size());
    REQUIRE(place_within(blocks, 1'050'000, 100'000'000));
    CHECK(apart(blocks));
    std::vector<Block> again = blocks;
    REQUIRE(place_within(again, 1'050'000, 100'000'000));
    const bool same = std::equal(blocks.begin(), blocks.end(), again.begin(),
                                 [](const Block& a, const Block& b) { return a.offset == b.offset; });
    CHECK(same);
  }
}

TEST_CASE("a search without work ends without a placement") {
  std::vector<Block> blocks{block(5, 0, 3), block(4, 2, 5)};
  CHECK_FALSE(place_within(blocks, 100, 0));
  CHECK(place_within(blocks, 100, 1000));
  std::vector<Block> none;
  CHECK(place_within(none, 0, 1000));
}
