// Whether a worker still does something while it is waited for. A heartbeat says that its process is
// scheduled; a call inside a vendor's software that waits for ever is seen by what it no longer does.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>

#include "worker/wait.hpp"

namespace rm::worker {

/// What the processes of one session have done since each of them started.
struct Activity {
  double cpu_s = 0;
  uint64_t io_bytes = 0;     ///< read and written, sockets and files
  uint64_t page_faults = 0;  ///< pages of files that were waited for
  uint64_t processes = 0;
};

/// From /proc; nullopt where that tells nothing about the session.
std::optional<Activity> activity_of(pid_t session);

/// Judges a row of observations. It moves when, since it last moved, it was heard of, or used more
/// than a hundredth of a core, or read, wrote or waited for more than an idle process does.
class StallJudge {
 public:
  StallJudge(double limit_s, WaitClock::time_point now) : limit_(limit_s), moved_at_(now) {}
  /// A message came, or its log grew.
  void heard(WaitClock::time_point now) { moved_at_ = now, has_mark_ = false; }
  void saw(const Activity& activity, WaitClock::time_point now);
  bool has_stalled(WaitClock::time_point now) const { return now - moved_at_ > limit_; }

 private:
  const std::chrono::duration<double> limit_;
  WaitClock::time_point moved_at_;
  Activity mark_;  // as it was when it last moved
  bool has_mark_ = false;
};

/// The same for a live process: looks at it now and then, as often as the limit asks for.
class StallWatch {
 public:
  /// `session` is the id of a process that leads its own session. A limit of 0: never.
  StallWatch(pid_t session, double limit_s);
  void heard() { judge_.heard(WaitClock::now()); }
  /// `log_bytes`: what it has written to its log so far.
  bool has_stalled(uint64_t log_bytes);
  double limit_s() const noexcept { return limit_s_; }

 private:
  const pid_t session_;
  const double limit_s_;
  StallJudge judge_;
  WaitClock::time_point next_look_;
  uint64_t log_bytes_ = 0;
};

}  // namespace rm::worker
