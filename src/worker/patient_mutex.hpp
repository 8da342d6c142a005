// A mutex whose waiters look around while they wait: at their deadline, at Ctrl-C, at the process
// they wait for. First come, first served, so that a wait is as long as the waits before it.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>

namespace rm::worker {

class PatientMutex {
 public:
  /// Calls `look` once every `slice` of waiting; what it throws ends the wait without the lock.
  template <class Look>
  void lock(std::chrono::milliseconds slice, Look&& look) {
    std::unique_lock guard(state_);
    const uint64_t ticket = next_ticket_++;
    waiting_.push_back(ticket);
    const auto is_my_turn = [&] { return !locked_ && waiting_.front() == ticket; };
    try {
      while (!turn_.wait_for(guard, slice, is_my_turn)) {
        guard.unlock();  // `look` may take locks of its own, the interpreter's for one
        look();
        guard.lock();
      }
    } catch (...) {
      if (!guard.owns_lock()) guard.lock();
      waiting_.erase(std::find(waiting_.begin(), waiting_.end(), ticket));
      turn_.notify_all();
      throw;
    }
    waiting_.pop_front();
    locked_ = true;
  }

  /// False when it is locked or others wait for it.
  bool try_lock() {
    const std::lock_guard guard(state_);
    if (locked_ || !waiting_.empty()) return false;
    return locked_ = true;
  }

  void unlock() {
    bool is_awaited = false;
    {
      const std::lock_guard guard(state_);
      locked_ = false;
      is_awaited = !waiting_.empty();
    }
    if (is_awaited) turn_.notify_all();
  }

 private:
  std::mutex state_;  // guards what follows
  std::condition_variable turn_;
  std::deque<uint64_t> waiting_;
  uint64_t next_ticket_ = 0;
  bool locked_ = false;
};

}  // namespace rm::worker
