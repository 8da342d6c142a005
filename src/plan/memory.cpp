// The memory planner: offline placement of buffers with known lifetimes. Several greedy orders, then a
// search for a placement near the max-live lower bound, then hill climbing where it found none.
#include <algorithm>
#include <array>
#include <numeric>

#include "plan/place.hpp"
#include "plan/plan.hpp"

namespace rm::plan {
namespace {

int64_t align(int64_t bytes) {
  return (bytes + kArenaAlignment - 1) / kArenaAlignment * kArenaAlignment;
}

std::vector<Block> blocks_of(const Plan& plan) {
  std::vector<Block> by_buffer(plan.buffers.size());
  std::vector<Block> out;
  for (size_t s = 0; s < plan.steps.size(); ++s) {
    auto at = static_cast<int32_t>(s);
    auto touch = [&](const Ref& r) {
      if (!r.present()) return;
      Block& b = by_buffer[static_cast<size_t>(r.buffer)];
      b.first = std::min(b.first, at);
      b.last = std::max(b.last, at);
    };
    std::for_each(plan.steps[s].step.inputs.begin(), plan.steps[s].step.inputs.end(), touch);
    std::for_each(plan.steps[s].step.outputs.begin(), plan.steps[s].step.outputs.end(), touch);
    if (int64_t bytes = plan.steps[s].kernel->workspace_bytes; bytes > 0) {
      out.push_back({align(bytes), at, at, -1, -1});
    }
  }
  for (size_t i = 0; i < by_buffer.size(); ++i) {
    Block& b = by_buffer[i];
    if (plan.buffers[i].kind != BufferKind::kTemp || b.last < 0) continue;
    b.buffer = static_cast<int32_t>(i);
    b.bytes = align(std::max<int64_t>(plan.buffers[i].bytes, 1));
    out.push_back(b);
  }
  return out;
}

int64_t max_live(const std::vector<Block>& blocks, size_t steps) {
  std::vector<int64_t> change(steps + 1, 0);
  for (const auto& b : blocks) {
    change[static_cast<size_t>(b.first)] += b.bytes;
    change[static_cast<size_t>(b.last) + 1] -= b.bytes;
  }
  int64_t live = 0, best = 0;
  for (int64_t c : change) best = std::max(best, live += c);
  return best;
}

enum class Fit { kSmallest, kFirst };

// Into a gap among the blocks alive at the same time, or above them. Returns the arena size.
int64_t place(std::vector<Block>& blocks, const std::vector<size_t>& order, Fit fit) {
  std::vector<size_t> placed;  // sorted by offset
  int64_t arena = 0;
  for (size_t i : order) {
    Block& b = blocks[i];
    int64_t best = -1, best_gap = INT64_MAX, at = 0;
    for (size_t j : placed) {
      const Block& other = blocks[j];
      if (other.last < b.first || b.last < other.first) continue;
      if (int64_t gap = other.offset - at; gap >= b.bytes && gap < best_gap) {
        best = at;
        best_gap = gap;
        if (fit == Fit::kFirst) break;
      }
      at = std::max(at, other.offset + other.bytes);
    }
    b.offset = best >= 0 ? best : at;
    arena = std::max(arena, b.offset + b.bytes);
    auto position = std::upper_bound(placed.begin(), placed.end(), i, [&](size_t x, size_t y) {
      return blocks[x].offset < blocks[y].offset;
    });
    placed.insert(position, i);
  }
  return arena;
}

using Before = bool (*)(const Block&, const Block&);
int64_t length(const Block& b) { return b.last - b.first + 1; }

constexpr std::array<Before, 4> kOrders{
    [](const Block& a, const Block& b) { return a.bytes > b.bytes; },
    [](const Block& a, const Block& b) { return a.bytes * length(a) > b.bytes * length(b); },
    [](const Block& a, const Block& b) {
      return length(a) != length(b) ? length(a) > length(b) : a.bytes > b.bytes;
    },
    [](const Block& a, const Block& b) { return a.first < b.first; },
};

// Near enough to the lower bound, and how hard to try to come near: a placement takes time square in
// the number of blocks, so large plans have fewer tries.
constexpr int64_t kSlack = 200;  // 1 / 200 of the bound
constexpr size_t kMostTries = 400, kMostWork = 60'000'000;
// The search for a placement within these parts of the bound, in simple operations (150 million are a
// few hundred milliseconds). What can be won decides how long is searched: a small model that meets a
// new size waits for milliseconds, a training step of tens of MiB for longer.
struct Aim {
  int64_t slack, most_work;
};
constexpr Aim kAims[] = {{kSlack, 150'000'000}, {100, 30'000'000}, {50, 30'000'000}};
constexpr int64_t kWorkPerByte = 150, kLeastWork = 1'000'000;

struct Placement {
  std::vector<Block> blocks;
  std::vector<size_t> order;
  Fit fit = Fit::kSmallest;
  int64_t arena = INT64_MAX;
};

Placement placed(std::vector<Block> blocks, std::vector<size_t> order, Fit fit) {
  Placement out{std::move(blocks), std::move(order), fit, 0};
  out.arena = place(out.blocks, out.order, fit);
  return out;
}

// The block that ends highest exchanges its place in the order with one that lives at the same time
// and came earlier. Keeps what is no worse. The draws are the same in every process.
Placement climbed(Placement best, int64_t enough) {
  const size_t n = best.order.size();
  const size_t tries = std::min(kMostTries, kMostWork / (n * n + 1));
  uint64_t state = 0x9e3779b97f4a7c15ULL;
  for (size_t t = 0; t < tries && best.arena > enough; ++t) {
    std::vector<size_t> earlier;
    size_t top = 0;
    for (size_t i = 0; i < n; ++i) {
      const Block& b = best.blocks[best.order[i]];
      if (b.offset + b.bytes == best.arena) top = i;
    }
    const Block& high = best.blocks[best.order[top]];
    for (size_t i = 0; i < top; ++i) {
      const Block& b = best.blocks[best.order[i]];
      if (b.first <= high.last && high.first <= b.last) earlier.push_back(i);
    }
    if (earlier.empty()) break;
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    const size_t with = earlier[(state >> 33) % earlier.size()];
    std::vector<size_t> order = best.order;
    if ((state >> 32) % 2 == 0) {
      std::swap(order[top], order[with]);
    } else {
      std::rotate(order.begin() + static_cast<std::ptrdiff_t>(with),
                  order.begin() + static_cast<std::ptrdiff_t>(top),
                  order.begin() + static_cast<std::ptrdiff_t>(top) + 1);
    }
    Placement next = placed(best.blocks, std::move(order), best.fit);
    if (next.arena <= best.arena) best = std::move(next);
  }
  return best;
}

}  // namespace

void plan_memory(Plan& plan) {
  std::vector<Block> blocks = blocks_of(plan);
  plan.lower_bound_bytes = max_live(blocks, plan.steps.size());
  bool placed_by_search = false;
  const int64_t enough = plan.lower_bound_bytes + plan.lower_bound_bytes / kSlack;
  Placement best;
  for (Before before : kOrders) {
    std::vector<size_t> order(blocks.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return before(blocks[a], blocks[b]); });
    for (Fit fit : {Fit::kSmallest, Fit::kFirst}) {
      Placement found = placed(blocks, order, fit);
      if (found.arena < best.arena) best = std::move(found);
      if (best.arena == plan.lower_bound_bytes) break;
    }
    if (best.arena == plan.lower_bound_bytes) break;
  }
  for (const Aim& aim : kAims) {
    const int64_t most = plan.lower_bound_bytes + plan.lower_bound_bytes / aim.slack;
    if (best.arena <= most) break;
    const int64_t won = (best.arena - most) * kWorkPerByte;
    if (!place_within(best.blocks, most, std::clamp(won, kLeastWork, aim.most_work))) continue;
    best.arena = 0;
    for (const Block& b : best.blocks) best.arena = std::max(best.arena, b.offset + b.bytes);
    placed_by_search = true;
    break;
  }
  if (!placed_by_search) best = climbed(std::move(best), enough);
  plan.arena_bytes = best.arena;
  for (const auto& b : best.blocks) {
    if (b.buffer >= 0) {
      plan.offsets[static_cast<size_t>(b.buffer)] = b.offset;
    } else {
      plan.steps[static_cast<size_t>(b.first)].workspace_offset = b.offset;
    }
  }
}

}  // namespace rm::plan
