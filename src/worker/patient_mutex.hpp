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

/// Waiters in a row for something that its owner describes: whether it is there, and taking it.
class PatientQueue {
 public:
  /// Waits until it is this caller's turn and `is_there`, then calls `take`. Calls `look` once
  /// every `slice` of waiting; what it throws ends the wait with nothing taken.
  template <class Look, class IsThere, class Take>
  void wait(std::chrono::milliseconds slice, Look&& look, IsThere&& is_there, Take&& take) {
    std::unique_lock guard(state_);
    const uint64_t ticket = next_ticket_++;
    waiting_.push_back(ticket);
    const auto is_my_turn = [&] { return waiting_.front() == ticket && is_there(); };
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
    take();
    const bool is_awaited = !waiting_.empty();  // there may be some left for the next
    guard.unlock();
    if (is_awaited) turn_.notify_all();
  }

  /// True when nobody waits and `take` took it.
  template <class Take>
  bool try_take(Take&& take) {
    const std::lock_guard guard(state_);
    return waiting_.empty() && take();
  }

  template <class Change>
  void change(Change&& change) {
    bool is_awaited = false;
    {
      const std::lock_guard guard(state_);
      change();
      is_awaited = !waiting_.empty();
    }
    if (is_awaited) turn_.notify_all();
  }

 private:
  std::mutex state_;  // guards what follows and what the owner describes
  std::condition_variable turn_;
  std::deque<uint64_t> waiting_;
  uint64_t next_ticket_ = 0;
};

class PatientMutex {
 public:
  template <class Look>
  void lock(std::chrono::milliseconds slice, Look&& look) {
    queue_.wait(slice, look, [&] { return !locked_; }, [&] { locked_ = true; });
  }

  /// False when it is locked or others wait for it.
  bool try_lock() {
    return queue_.try_take([&] { return locked_ ? false : (locked_ = true); });
  }

  void unlock() {
    queue_.change([&] { locked_ = false; });
  }

 private:
  PatientQueue queue_;
  bool locked_ = false;  // guarded by queue_
};

}  // namespace rm::worker
