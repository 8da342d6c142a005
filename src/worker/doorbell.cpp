// Futex waits, with a spin in front that is as long as it has paid lately.
#include "worker/doorbell.hpp"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>

namespace rm::worker {
namespace {

constexpr auto kMostSpin = std::chrono::microseconds(20);
constexpr auto kTrialSpin = std::chrono::microseconds(4);
constexpr uint32_t kTrialEvery = 256;  // waits without spinning before it is tried again

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

bool can_spin() {
  static const bool several = sysconf(_SC_NPROCESSORS_ONLN) > 1;
  return several;
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, timeout, nullptr,
                 0);
}

}  // namespace

void Signal::ring(uint32_t value) {
  number.store(value, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) futex(&number, FUTEX_WAKE, INT32_MAX, nullptr);
}

std::chrono::nanoseconds SpinBudget::next() {
  if (budget_.count() == 0 && can_spin() && ++waits_ % kTrialEvery == 0) return kTrialSpin;
  return budget_;
}

void SpinBudget::succeeded() {
  budget_ = std::min<std::chrono::nanoseconds>(
      kMostSpin, std::max<std::chrono::nanoseconds>(budget_ * 2, kTrialSpin));
}

void SpinBudget::failed() { budget_ = budget_ > kTrialSpin ? budget_ / 2 : budget_.zero(); }

bool Signal::wait_change(uint32_t seen, std::chrono::nanoseconds timeout, SpinBudget& spin) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  if (const auto budget = spin.next(); budget.count() > 0) {
    do {
      for (int i = 0; i < 32; ++i) {
        if (number.load(std::memory_order_acquire) != seen) {
          spin.succeeded();
          return true;
        }
        relax();
      }
    } while (Clock::now() - start < budget);
    spin.failed();
  }
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool changed = number.load(std::memory_order_seq_cst) != seen;
  while (!changed && timeout == kForever) {  // without a timer a sleep is a microsecond cheaper
    futex(&number, FUTEX_WAIT, seen, nullptr);
    changed = number.load(std::memory_order_seq_cst) != seen;
  }
  while (!changed) {
    const auto left = timeout - (Clock::now() - start);
    if (left <= std::chrono::nanoseconds::zero()) break;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(left);
    const timespec limit{seconds.count(), (left - seconds).count()};
    futex(&number, FUTEX_WAIT, seen, &limit);  // a signal or another value: looked at again
    changed = number.load(std::memory_order_seq_cst) != seen;
  }
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return changed;
}

void Doorbell::answer(uint32_t new_code, const std::string& new_reason,
                      const std::string& new_message) {
  code = new_code;
  reason_bytes = static_cast<uint32_t>(std::min(new_reason.size(), sizeof reason));
  message_bytes = static_cast<uint32_t>(std::min(new_message.size(), kMessageBytes));
  std::memcpy(reason, new_reason.data(), reason_bytes);
  std::memcpy(message, new_message.data(), message_bytes);
}

std::string Doorbell::answered_reason() const {
  const volatile uint32_t& size = reason_bytes;  // read once: the other side may still write
  return std::string(reason, std::min<size_t>(size, sizeof reason));
}

std::string Doorbell::answered_message() const {
  const volatile uint32_t& size = message_bytes;
  return std::string(message, std::min<size_t>(size, kMessageBytes));
}

}  // namespace rm::worker
