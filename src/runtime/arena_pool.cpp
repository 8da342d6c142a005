// Arenas are used last in, first out, so those that nobody needs stay at the front.
#include "runtime/arena_pool.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace rm::runtime {
namespace {

constexpr int kRunsPerRound = 1024;

// Up to a quarter more: four sizes to a power of two.
int64_t rounded(int64_t bytes) {
  const auto n = static_cast<uint64_t>(std::max<int64_t>(bytes, 4096));
  const uint64_t step = std::bit_floor(n) / 4;
  return static_cast<int64_t>((n + step - 1) / step * step);
}

}  // namespace

Arena make_arena(int64_t bytes, Device& device) {
  const int64_t size = rounded(bytes);
  return {device.allocate(static_cast<size_t>(size)), size};
}

Arena ArenaPool::acquire(int64_t bytes) {
  if (free_.empty()) return {};
  auto it = free_.end() - 1;
  while (it->bytes < bytes && it != free_.begin()) --it;
  if (it->bytes < bytes) it = free_.end() - 1;  // none: the one used last is replaced
  Arena out = std::move(*it);
  free_.erase(it);
  unused_ = std::min(unused_, free_.size());
  return out;
}

std::vector<Arena> ArenaPool::release(Arena arena, int64_t largest) {
  std::vector<Arena> dropped;
  if (arena.bytes > 2 * rounded(largest)) {
    dropped.push_back(std::move(arena));
  } else {
    free_.push_back(std::move(arena));
  }
  if (++runs_ < kRunsPerRound) return dropped;
  const auto end = free_.begin() + static_cast<std::ptrdiff_t>(std::min(unused_, free_.size()));
  std::move(free_.begin(), end, std::back_inserter(dropped));
  free_.erase(free_.begin(), end);
  unused_ = free_.size();
  runs_ = 0;
  return dropped;
}

std::vector<Arena> ArenaPool::take_free() {
  unused_ = 0;
  return std::exchange(free_, {});
}

int64_t ArenaPool::free_bytes() const {
  int64_t total = 0;
  for (const Arena& a : free_) total += a.bytes;
  return total;
}

Arena Arenas::acquire(rm_stream* stream, int64_t bytes) {
  std::lock_guard lock(mutex_);
  return pools_[stream].acquire(bytes);
}

std::vector<Arena> Arenas::release(rm_stream* stream, Arena arena, int64_t largest, bool shared) {
  std::lock_guard lock(mutex_);
  largest_ = shared ? std::max(largest_, largest) : largest;
  return pools_[stream].release(std::move(arena), largest_);
}

int64_t Arenas::free_bytes() const {
  std::lock_guard lock(mutex_);
  int64_t total = 0;
  for (const auto& [stream, pool] : pools_) total += pool.free_bytes();
  return total;
}

std::vector<Arena> Arenas::take_free() {
  std::lock_guard lock(mutex_);
  std::vector<Arena> all;
  for (auto& [stream, pool] : pools_) {
    for (Arena& arena : pool.take_free()) all.push_back(std::move(arena));
  }
  return all;
}

}  // namespace rm::runtime
