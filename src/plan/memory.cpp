// The memory planner: offline placement of buffers with known lifetimes (the dynamic storage
// allocation problem). Several greedy orders, best kept, stopping at the max-live lower bound.
#include <algorithm>
#include <array>
#include <numeric>

#include "plan/plan.hpp"

namespace rm::plan {
namespace {

struct Block {
  int64_t bytes = 0;
  int32_t first = INT32_MAX, last = -1;  // steps, inclusive
  int32_t buffer = -1;                   // -1: the workspace of step `first`
  int64_t offset = -1;
};

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

// Best-fit: the smallest gap among the blocks alive at the same time. Returns the arena size.
int64_t place(std::vector<Block>& blocks, const std::vector<size_t>& order) {
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

}  // namespace

void plan_memory(Plan& plan) {
  std::vector<Block> blocks = blocks_of(plan);
  plan.lower_bound_bytes = max_live(blocks, plan.steps.size());
  plan.arena_bytes = INT64_MAX;
  std::vector<Block> best;
  for (Before before : kOrders) {
    std::vector<size_t> order(blocks.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](size_t a, size_t b) { return before(blocks[a], blocks[b]); });
    int64_t arena = place(blocks, order);
    if (arena < plan.arena_bytes) {
      plan.arena_bytes = arena;
      best = blocks;
    }
    if (arena == plan.lower_bound_bytes) break;
  }
  for (const auto& b : best) {
    if (b.buffer >= 0) {
      plan.offsets[static_cast<size_t>(b.buffer)] = b.offset;
    } else {
      plan.steps[static_cast<size_t>(b.first)].workspace_offset = b.offset;
    }
  }
}

}  // namespace rm::plan
