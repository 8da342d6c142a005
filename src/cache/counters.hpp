// What the cache did, as names and numbers: in this process, and summed over all on disk.
// Losing a count is fine; failing because of one is not.
#pragma once

#include <sched.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <string_view>

#include "cache/types.hpp"

namespace rm::cache {

enum class Counter {
  kHitMemory,
  kHitDisk,
  kHitShared,
  kMiss,
  kStore,
  kStoreLost,
  kCorrupt,
  kIncompatible,
  kUntrusted,
  kGuardMiss,
  kEvicted,
  kCompile,
  kCompileFail,
  kLockTimeout,
  kLockWaitMs,
  kCheckSame,
  kCheckDiffer,
  kBytesRead,
  kBytesWritten,
  kCompileMs,
  kSavedMs,
  kCount
};
std::string_view counter_name(Counter counter);

class Counters {
 public:
  void add(Counter counter, uint64_t amount = 1) noexcept {
    Shard& shard = shards_[static_cast<size_t>(sched_getcpu()) % kShards];
    shard.values[static_cast<size_t>(counter)].fetch_add(amount, std::memory_order_relaxed);
  }
  /// A counter with a reason: "bypass{reason}", "store_fail{ENOSPC}".
  void add(std::string_view name, std::string_view reason);

  /// Every counter, zero or not, and every reason seen.
  CounterMap values() const;

  /// Adds what was counted since the last call to one of the files of `directory`, under flock.
  /// False when that was not possible; the counts are then kept for the next call.
  bool flush(const std::string& directory) noexcept;
  /// The sum of the files. One that cannot be read or parsed counts as empty.
  static CounterMap read(const std::string& directory) noexcept;

 private:
  /// One a core, more or less: hits on different cores write to different cache lines.
  struct alignas(64) Shard {
    std::array<std::atomic<uint64_t>, static_cast<size_t>(Counter::kCount)> values{};
  };
  static constexpr size_t kShards = 16;

  std::array<Shard, kShards> shards_;
  mutable std::mutex mutex_;  // guards what is below
  CounterMap reasons_, flushed_;
};

}  // namespace rm::cache
