// Entries kept open in this process, least recently used ones dropped above a size. Sharded, and
// a hit takes only a shared lock, so that concurrent hits scale with the cores.
#pragma once

#include <array>
#include <atomic>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "cache/types.hpp"

namespace rm::cache {

class MemoryTier {
 public:
  explicit MemoryTier(uint64_t capacity_bytes) : capacity_bytes_(capacity_bytes) {}

  /// All entries of the key: more than one when guards tell them apart.
  std::vector<EntryPtr> find(const Digest& key);
  void insert(EntryPtr entry);
  void erase(const Digest& key, const Digest& guard_digest);
  void clear();

  uint64_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }
  /// Dropped for space since the start, and how many entries are held: many more drops than
  /// entries means the capacity is too small for what the process does.
  uint64_t dropped() const noexcept { return dropped_.load(std::memory_order_relaxed); }
  size_t size() const noexcept { return count_.load(std::memory_order_relaxed); }

 private:
  struct Slot {
    EntryPtr entry;
    std::atomic<uint64_t> used;  // time of the last use, ns
    Slot(EntryPtr e, uint64_t now) : entry(std::move(e)), used(now) {}
    Slot(Slot&& other) noexcept : entry(std::move(other.entry)), used(other.used.load()) {}
    Slot& operator=(Slot&& other) noexcept {
      entry = std::move(other.entry);
      used.store(other.used.load());
      return *this;
    }
  };
  struct alignas(64) Shard {
    std::shared_mutex mutex;
    std::unordered_map<Digest, std::vector<Slot>> slots;
  };
  static constexpr size_t kShards = 16;

  Shard& shard_of(const Digest& key) { return shards_[key.bytes[0] % kShards]; }
  void drop_oldest();

  std::array<Shard, kShards> shards_;
  const uint64_t capacity_bytes_;
  std::atomic<uint64_t> bytes_{0}, dropped_{0};
  std::atomic<size_t> count_{0};
};

}  // namespace rm::cache
