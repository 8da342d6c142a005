// A depth-first search that places blocks in the order of their offsets, each on the highest below it:
// every placement in which no block can sink has such an order. A branch ends where what is left of
// some step's blocks does not fit above them. Both bounds are those of Moffitt, MiniMalloc (ASPLOS 2023).
//
// An order of candidates that fails early is rarely mended deep in the tree, so the search starts again:
// areas are spread at random, and blocks that were in the way of others come earlier, as variables
// are weighed by the constraints that failed on them (Boussemart et al., ECAI 2004).
#include "plan/place.hpp"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

namespace rm::plan {
namespace {

// How far the logarithms of areas are spread in attempts behind the first, which are by area alone.
constexpr double kSpread[] = {0.5, 2.0, 0.1, 1.0};
// A plan of so many blocks is left to the greedy orders.
constexpr size_t kMostBlocks = 4000;
// An attempt has work for about so many descents without a step back.
constexpr int64_t kDescents = 5;
// By how much the logarithm of an area grows for the block that failed most, and what is left of
// a failure after each attempt.
constexpr double kFailed = 8.0, kRemembered = 0.9;

class OffsetSearch {
 public:
  OffsetSearch(const std::vector<Block>& blocks, int64_t capacity)
      : blocks_(blocks), capacity_(capacity), below_(blocks.size()), meets_(blocks.size()) {
    std::vector<int32_t> events;
    for (const Block& b : blocks) events.insert(events.end(), {b.first, b.last + 1});
    std::sort(events.begin(), events.end());
    events.erase(std::unique(events.begin(), events.end()), events.end());
    const auto section = [&](int32_t step) {
      return static_cast<size_t>(std::lower_bound(events.begin(), events.end(), step) -
                                 events.begin());
    };
    covers_.resize(events.empty() ? 0 : events.size() - 1);
    for (size_t i = 0; i < blocks.size(); ++i) {
      spans_.emplace_back(section(blocks[i].first), section(blocks[i].last + 1));
      for (size_t s = spans_[i].first; s < spans_[i].second; ++s) covers_[s].push_back(i);
      for (size_t j = 0; j < i; ++j) {
        if (blocks[j].last < blocks[i].first || blocks[i].last < blocks[j].first) continue;
        meets_[i].push_back(j);
        meets_[j].push_back(i);
      }
    }
  }

  /// What one descent without a step back costs, about.
  int64_t descent_work() const {
    int64_t sum = 0;
    for (const auto& m : meets_) sum += static_cast<int64_t>(m.size());
    const auto n = static_cast<int64_t>(blocks_.size());
    return 2 * n * n + sum;
  }

  bool attempt(size_t number, int64_t work) {
    draw_keys(number);
    work_ = work;
    left_ = blocks_.size();
    placed_.assign(blocks_.size(), 0);
    std::fill(below_.begin(), below_.end(), 0);
    rest_.assign(covers_.size(), 0);
    for (size_t s = 0; s < covers_.size(); ++s) {
      for (size_t i : covers_[s]) rest_[s] += blocks_[i].bytes;
    }
    return grow(0);
  }

  int64_t offset(size_t block) const { return below_[block]; }
  int64_t work_left() const { return work_; }

 private:
  void draw_keys(size_t number) {
    const double spread = number == 0 ? 0 : kSpread[(number - 1) % std::size(kSpread)];
    uint64_t state = 0x9e3779b97f4a7c15ULL * (number + 1);
    keys_.resize(blocks_.size());
    failures_.resize(blocks_.size(), 0);
    double most = 1;
    for (double f : failures_) most = std::max(most, f);
    for (size_t i = 0; i < keys_.size(); ++i) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      const double drawn = static_cast<double>(state >> 11) / static_cast<double>(1ULL << 53);
      const double area = static_cast<double>(blocks_[i].bytes) *
                          static_cast<double>(spans_[i].second - spans_[i].first);
      keys_[i] = std::log(area) + spread * (drawn - 0.5) + kFailed * failures_[i] / most;
      if (number == 0) keys_[i] = area;  // equal ones stay in their order
      failures_[i] *= kRemembered;
    }
  }

  // `low`: no block that is left lies lower. True: all are placed.
  bool grow(int64_t low) {
    if (left_ == 0) return true;
    if (work_ <= 0) return false;
    int64_t bound = INT64_MAX, top = 0;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (placed_[i] != 0) continue;
      const int64_t at = std::max(below_[i], low);
      if (at + blocks_[i].bytes > capacity_) {
        failures_[i] += 1;
        return false;
      }
      bound = std::min(bound, at + blocks_[i].bytes);
      top = std::max(top, at);
    }
    work_ -= static_cast<int64_t>(blocks_.size());
    if (!fits(low, top)) return false;
    const std::vector<size_t> candidates = candidates_below(bound, low);
    const Block* tried = nullptr;
    for (size_t i : candidates) {
      const Block& b = blocks_[i];
      const bool same = tried != nullptr && tried->bytes == b.bytes && tried->first == b.first &&
                        tried->last == b.last;
      if (same) continue;
      tried = &b;
      const size_t mark = raised_.size();
      put(i);
      if (grow(below_[i])) return true;
      take(i, mark);
      if (work_ <= 0) return false;
    }
    return false;
  }

  // Whether the blocks that are left have room above the lowest of them, at every step.
  bool fits(int64_t low, int64_t top) {
    for (size_t s = 0; s < covers_.size(); ++s) {
      if (rest_[s] == 0 || top + rest_[s] <= capacity_) continue;
      int64_t least = INT64_MAX;
      for (size_t i : covers_[s]) {
        if (placed_[i] == 0) least = std::min(least, std::max(below_[i], low));
      }
      work_ -= static_cast<int64_t>(covers_[s].size());
      if (least + rest_[s] > capacity_) {
        for (size_t i : covers_[s]) failures_[i] += placed_[i] == 0 ? 1 : 0;
        return false;
      }
    }
    work_ -= static_cast<int64_t>(covers_.size());
    return true;
  }

  // Where another block would fit as a whole below, the next one lies higher than need be.
  std::vector<size_t> candidates_below(int64_t bound, int64_t low) const {
    std::vector<size_t> out;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      if (placed_[i] == 0 && below_[i] >= low && below_[i] < bound) out.push_back(i);
    }
    std::sort(out.begin(), out.end(), [&](size_t a, size_t b) {
      if (below_[a] != below_[b]) return below_[a] < below_[b];
      return keys_[a] != keys_[b] ? keys_[a] > keys_[b] : a < b;
    });
    return out;
  }

  void put(size_t i) {
    placed_[i] = 1;
    --left_;
    const int64_t end = below_[i] + blocks_[i].bytes;
    for (size_t j : meets_[i]) {
      if (placed_[j] != 0 || below_[j] >= end) continue;
      raised_.emplace_back(j, below_[j]);
      below_[j] = end;
    }
    for (size_t s = spans_[i].first; s < spans_[i].second; ++s) rest_[s] -= blocks_[i].bytes;
    work_ -= static_cast<int64_t>(meets_[i].size());
  }

  void take(size_t i, size_t mark) {
    while (raised_.size() > mark) {
      below_[raised_.back().first] = raised_.back().second;
      raised_.pop_back();
    }
    for (size_t s = spans_[i].first; s < spans_[i].second; ++s) rest_[s] += blocks_[i].bytes;
    placed_[i] = 0;
    ++left_;
  }

  const std::vector<Block>& blocks_;
  int64_t capacity_, work_ = 0;
  size_t left_ = 0;
  std::vector<int64_t> below_;                      // the highest end below a block; its offset once placed
  std::vector<std::vector<size_t>> meets_, covers_;  // by block: alive with it; by section: alive in it
  std::vector<std::pair<size_t, size_t>> spans_;    // sections of each block
  std::vector<int64_t> rest_;                       // bytes to be placed yet, by section
  std::vector<char> placed_;
  std::vector<double> keys_, failures_;             // by block: earlier candidates have larger keys
  std::vector<std::pair<size_t, int64_t>> raised_;  // what placing changed, to go back
};

}  // namespace

bool place_within(std::vector<Block>& blocks, int64_t capacity, int64_t work) {
  if (blocks.size() > kMostBlocks) return false;
  const auto n = static_cast<int64_t>(blocks.size());
  work -= n * n / 2;  // which blocks are alive together
  if (work <= 0) return false;
  OffsetSearch search(blocks, capacity);
  const int64_t descent = search.descent_work();
  for (size_t number = 0; work > 0; ++number) {
    const int64_t given = std::min(work, kDescents * descent);
    if (search.attempt(number, given)) {
      for (size_t i = 0; i < blocks.size(); ++i) blocks[i].offset = search.offset(i);
      return true;
    }
    if (search.work_left() > 0) return false;  // all was tried: there is no such placement
    work -= given;
  }
  return false;
}

}  // namespace rm::plan
