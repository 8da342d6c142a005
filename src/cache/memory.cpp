#include "cache/memory.hpp"

#include <algorithm>
#include <chrono>
#include <limits>
#include <mutex>

namespace rm::cache {
namespace {

/// Time of use in nanoseconds: unlike a counter nothing that all threads would write to.
uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

}  // namespace

std::vector<EntryPtr> MemoryTier::find(const Digest& key) {
  Shard& shard = shard_of(key);
  std::vector<EntryPtr> out;
  const std::shared_lock lock(shard.mutex);
  const auto found = shard.slots.find(key);
  if (found == shard.slots.end()) return out;
  const uint64_t now = now_ns();
  for (Slot& slot : found->second) {
    slot.used.store(now, std::memory_order_relaxed);
    out.push_back(slot.entry);
  }
  return out;
}

void MemoryTier::insert(EntryPtr entry) {
  const uint64_t size = entry->stored_bytes;
  if (size > capacity_bytes_) return;
  {
    Shard& shard = shard_of(entry->key);
    const std::unique_lock lock(shard.mutex);
    std::vector<Slot>& slots = shard.slots[entry->key];
    const auto same = std::find_if(slots.begin(), slots.end(), [&](const Slot& slot) {
      return slot.entry->guard_digest == entry->guard_digest;
    });
    const uint64_t now = now_ns();
    bytes_.fetch_add(size, std::memory_order_relaxed);
    if (same == slots.end()) {
      slots.emplace_back(std::move(entry), now);
      count_.fetch_add(1, std::memory_order_relaxed);
    } else {
      bytes_.fetch_sub(same->entry->stored_bytes, std::memory_order_relaxed);
      *same = Slot(std::move(entry), now);
    }
  }
  while (bytes() > capacity_bytes_ && size_t{1} < count_.load(std::memory_order_relaxed)) {
    drop_oldest();
  }
}

void MemoryTier::drop_oldest() {
  uint64_t oldest = std::numeric_limits<uint64_t>::max();
  Digest key, guards;
  for (Shard& shard : shards_) {
    const std::shared_lock lock(shard.mutex);
    for (const auto& [digest, slots] : shard.slots) {
      for (const Slot& slot : slots) {
        const uint64_t used = slot.used.load(std::memory_order_relaxed);
        if (used >= oldest) continue;
        oldest = used;
        key = digest;
        guards = slot.entry->guard_digest;
      }
    }
  }
  erase(key, guards);
  dropped_.fetch_add(1, std::memory_order_relaxed);
}

void MemoryTier::erase(const Digest& key, const Digest& guard_digest) {
  Shard& shard = shard_of(key);
  const std::unique_lock lock(shard.mutex);
  const auto found = shard.slots.find(key);
  if (found == shard.slots.end()) return;
  std::erase_if(found->second, [&](const Slot& slot) {
    if (slot.entry->guard_digest != guard_digest) return false;
    bytes_.fetch_sub(slot.entry->stored_bytes, std::memory_order_relaxed);
    count_.fetch_sub(1, std::memory_order_relaxed);
    return true;
  });
  if (found->second.empty()) shard.slots.erase(found);
}

void MemoryTier::clear() {
  for (Shard& shard : shards_) {
    const std::unique_lock lock(shard.mutex);
    for (const auto& [key, slots] : shard.slots) {
      for (const Slot& slot : slots) {
        bytes_.fetch_sub(slot.entry->stored_bytes, std::memory_order_relaxed);
        count_.fetch_sub(1, std::memory_order_relaxed);
      }
    }
    shard.slots.clear();
  }
}

}  // namespace rm::cache
