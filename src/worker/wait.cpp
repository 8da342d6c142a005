#include "worker/wait.hpp"

namespace rm::worker {
namespace {

WaitClock::time_point time_after(double seconds) {
  if (seconds <= 0) return WaitClock::time_point::max();
  return WaitClock::now() +
         std::chrono::duration_cast<WaitClock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

Deadline::Deadline(double timeout_s) : timeout_s_(timeout_s), at_(time_after(timeout_s)) {}

bool HeartbeatWatch::has_stopped() {
  const uint64_t count = bell_.heartbeat.load(std::memory_order_relaxed);
  const auto now = WaitClock::now();
  if (count != seen_) {
    seen_ = count;
    seen_at_ = now;
  }
  return now - seen_at_ > std::chrono::duration<double>(limit_s_);
}

}  // namespace rm::worker
