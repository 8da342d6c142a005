// One caller's wait for a worker: how long it may take, and what is looked at meanwhile.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "worker/doorbell.hpp"

namespace rm::worker {

/// Called a few times a second while waiting, outside all locks of ours; what it throws cancels
/// the request (Ctrl-C).
using Interrupt = std::function<void()>;

/// Seconds; 0 waits for ever.
struct WaitLimits {
  double timeout_s = 0;
  Interrupt interrupt;
  double stall_s = 0;  ///< how long a request may do nothing at all (activity.hpp)
};

using WaitClock = std::chrono::steady_clock;
inline constexpr std::chrono::milliseconds kWaitSlice{50};

/// The deadline of one call, from its first wait (for a lock) to its last.
class Deadline {
 public:
  explicit Deadline(double timeout_s);
  bool has_passed() const { return WaitClock::now() > at_; }
  double timeout_s() const noexcept { return timeout_s_; }

 private:
  double timeout_s_;
  WaitClock::time_point at_;
};

/// Whether the worker's heartbeat goes on, as one waiter sees it. Its state belongs to one call:
/// several threads may wait for one worker.
class HeartbeatWatch {
 public:
  HeartbeatWatch(const Doorbell& bell, double limit_s) : bell_(bell), limit_s_(limit_s) {}
  /// True when it has not counted for the limit.
  bool has_stopped();

 private:
  const Doorbell& bell_;
  const double limit_s_;
  uint64_t seen_ = 0;
  WaitClock::time_point seen_at_ = WaitClock::now();
};

}  // namespace rm::worker
