// Memory for the temporaries of runs: one pool a stream and program, or several programs, whatever
// shapes they run.
//
// There are as many arenas as runs were under way at once. An arena that was never needed during
// many runs is given up, and so is one much larger than any shape in use needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "runtime/device.hpp"

namespace rm::runtime {

struct Arena {
  std::shared_ptr<void> memory;
  int64_t bytes = 0;
  std::byte* base() const { return static_cast<std::byte*>(memory.get()); }
};

/// An arena of at least `bytes`, rounded up so that slowly growing shapes reuse it.
Arena make_arena(int64_t bytes, Device& device = *host());

/// Not thread safe. Allocates and frees nothing itself: what it gives up is returned to the caller.
class ArenaPool {
 public:
  /// The arena used last; too small, or empty, when no free one has `bytes`. A caller that cannot
  /// use it makes another and drops this one.
  Arena acquire(int64_t bytes);
  /// Returns the arenas to be dropped. `largest` is what the largest shape in use needs.
  std::vector<Arena> release(Arena arena, int64_t largest);
  int64_t free_bytes() const;
  /// All that no run uses.
  std::vector<Arena> take_free();

 private:
  std::vector<Arena> free_;  // used last: at the back
  size_t unused_ = 0;        // arenas at the front that this round of runs has not needed
  int runs_ = 0;
};

/// Pools by stream: of one program, or of all that are given it, on one device. For any thread.
class Arenas {
 public:
  Arena acquire(rm_stream* stream, int64_t bytes);
  /// Returns the arenas to be dropped. `largest`: what the largest shape of the program needs.
  std::vector<Arena> release(rm_stream* stream, Arena arena, int64_t largest, bool shared);
  int64_t free_bytes() const;
  std::vector<Arena> take_free();

 private:
  mutable std::mutex mutex_;
  std::map<rm_stream*, ArenaPool> pools_;
  int64_t largest_ = 0;  // of all programs that share it
};

}  // namespace rm::runtime
