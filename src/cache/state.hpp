// The part of a CompileCache that belongs to one process: a child of fork starts with a fresh one,
// because the parent's locks may have been held and its compiling threads do not exist there.
#pragma once

#include <unistd.h>

#include <chrono>
#include <set>
#include <thread>

#include "cache/compile_cache.hpp"

namespace rm::cache {

using Clock = std::chrono::steady_clock;

inline double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// A compile under way in this process.
struct Flight {
  std::shared_future<EntryPtr> result;
  std::thread::id compiler;
};

struct CompileCache::State {
  explicit State(uint64_t memory_bytes) : pid(getpid()), memory(memory_bytes) {}

  const pid_t pid;
  MemoryTier memory;
  Counters counters;

  std::mutex mutex;  // guards what is below; never held while compiling or in a system call
  std::unordered_map<Digest, std::shared_ptr<Flight>> flights;
  std::set<std::string> warned;
  std::unordered_map<std::string, Digest> file_digests;  // by identity
  uint64_t written_since_collect = 0;
  bool collected = false;
};

}  // namespace rm::cache
