// Who may ring which doorbell: as many runs at once as the worker takes, and calls that nothing may
// run beside. First come, first served; waiters look around as those of a PatientMutex do.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "worker/patient_mutex.hpp"

namespace rm::worker {

class Lanes {
 public:
  static constexpr size_t kMost = 8;

  /// Before anybody takes one: how many there are.
  void open(size_t count) { all_ = free_ = (uint32_t{1} << count) - 1; }

  /// A lane of the caller's own.
  template <class Look>
  size_t take(std::chrono::milliseconds slice, Look&& look) {
    uint32_t taken = 0;
    queue_.wait(slice, look, [&] { return free_ != 0; },
                [&] { free_ &= ~(taken = free_ & -free_); });
    return static_cast<size_t>(std::countr_zero(taken));
  }
  void give(size_t lane) {
    queue_.change([&] { free_ |= uint32_t{1} << lane; });
  }

  /// All of them: nothing runs until they are given back.
  template <class Look>
  void take_all(std::chrono::milliseconds slice, Look&& look) {
    queue_.wait(slice, look, [&] { return free_ == all_; }, [&] { free_ = 0; });
  }
  void give_all() {
    queue_.change([&] { free_ = all_; });
  }

 private:
  PatientQueue queue_;
  uint32_t all_ = 1, free_ = 1;  // guarded by queue_
};

/// A lane as long as this lives.
class HeldLane {
 public:
  template <class Look>
  HeldLane(Lanes& lanes, std::chrono::milliseconds slice, Look&& look)
      : lanes_(lanes), number_(lanes.take(slice, look)) {}
  ~HeldLane() { lanes_.give(number_); }
  HeldLane(const HeldLane&) = delete;
  HeldLane& operator=(const HeldLane&) = delete;
  size_t number() const noexcept { return number_; }

 private:
  Lanes& lanes_;
  const size_t number_;
};

/// All lanes as long as this lives.
class AllLanes {
 public:
  template <class Look>
  AllLanes(Lanes& lanes, std::chrono::milliseconds slice, Look&& look) : lanes_(lanes) {
    lanes_.take_all(slice, look);
  }
  ~AllLanes() { lanes_.give_all(); }
  AllLanes(const AllLanes&) = delete;
  AllLanes& operator=(const AllLanes&) = delete;

 private:
  Lanes& lanes_;
};

}  // namespace rm::worker
