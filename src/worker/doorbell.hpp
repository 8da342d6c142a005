// The page both processes ring: a lane for each run that may be under way at once, with one request
// at a time, without a system call while the other side is still spinning.
//
// Invariant: what the worker writes is only read with bounds; a worker that scribbles over the page
// gives a wrong status or message, never a bad access in the user's process.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace rm::worker {

/// How long a waiter spins before it sleeps: as long as that pays. Where both sides share a core
/// spinning only keeps the other from running; where each has its own it saves two sleeps.
class SpinBudget {
 public:
  std::chrono::nanoseconds next();
  void succeeded();
  void failed();

 private:
  std::chrono::nanoseconds budget_{0};
  uint32_t waits_ = 0;
};

inline constexpr auto kForever = std::chrono::nanoseconds::max();

/// One direction: the writer raises `number`, the reader sleeps on it.
struct alignas(64) Signal {
  std::atomic<uint32_t> number;
  std::atomic<uint32_t> sleepers;

  /// Sets the number and wakes a sleeper.
  void ring(uint32_t value);
  /// Returns true as soon as the number is not `seen`; false after `timeout`.
  bool wait_change(uint32_t seen, std::chrono::nanoseconds timeout, SpinBudget& spin);
};

struct Doorbell {
  static constexpr uint32_t kMagic = 0x424d5244;  // "DRMB"
  static constexpr size_t kMessageBytes = 3072;
  uint32_t magic, version;  // these and the next: of the first lane
  uint32_t lanes;           // how many the worker serves; it writes it before it is ready
  Signal request, response;
  alignas(64) uint64_t handle;  // which program, written before the request rings
  uint64_t states;              // which set of states it updates; 0: none
  alignas(64) uint32_t code;    // rm_code of the answer, written before the response rings
  uint32_t reason_bytes, message_bytes;
  char reason[8];
  char message[kMessageBytes];
  // Of the first lane: counts while the worker's process is scheduled.
  alignas(64) std::atomic<uint64_t> heartbeat;

  void answer(uint32_t code, const std::string& reason, const std::string& message);
  std::string answered_reason() const;
  std::string answered_message() const;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace rm::worker
