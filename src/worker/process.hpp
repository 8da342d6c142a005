// A child process in a session of its own, whose output is kept in memory and which never outlives
// this object: killed with everything it started, and reaped. Any thread may call any function.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <mutex>
#include <string>
#include <vector>

#include "base/file.hpp"

namespace rm::worker {

class ChildProcess {
 public:
  struct Options {
    std::vector<std::string> command;      ///< command[0] is looked up in PATH
    std::vector<std::string> environment;  ///< "NAME=value", complete
    uint64_t memory_limit_bytes = 0;       ///< address space; 0: none
    std::string log_path = {};  ///< keeps all it writes in this file; empty: the end, in memory
  };
  /// The child finds `inherited` as descriptor 3. Throws rm::Error(RM_UNAVAILABLE, RM401).
  ChildProcess(const Options& options, const Fd& inherited);
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  ~ChildProcess();

  pid_t pid() const noexcept { return pid_; }
  /// Readable when the process has ended; -1 where the kernel has no pidfd.
  int pidfd() const noexcept { return pidfd_.get(); }
  bool alive();
  /// How it ended: "exit status 3", "signal 11 (Segmentation fault)"; empty while it runs.
  std::string ending();
  /// True when it ended within `limit`.
  bool wait_for(std::chrono::milliseconds limit);
  /// Kills the whole session at once and reaps the process. Returns after two seconds at most: a
  /// process inside an uninterruptible call of a driver is reaped when it has ended, by the next
  /// child that starts.
  void kill() noexcept;
  /// The last bytes it wrote to stdout and stderr.
  std::string log_tail(size_t bytes = 2048);
  /// Leaves the end only of a log that is kept in memory and has become long.
  void trim_log() noexcept;
  /// How much it has written so far, as long as nobody trims it.
  uint64_t log_bytes() const noexcept;
  /// Asks for the stacks of its threads on its log, where its program listens (a worker's does),
  /// and waits a moment for them. Another program may end by it.
  void ask_for_stacks() noexcept;
  /// "; its log is PATH" where a file keeps it, else empty.
  std::string log_named() const;

 private:
  enum class State { kRunning, kReaped, kLeftToTheNext };
  bool has_ended_locked() noexcept;
  pid_t pid_ = -1;
  pid_t owner_ = -1;  // a forked copy of this object must not touch the child
  Fd pidfd_, log_;
  const std::string log_path_;
  std::mutex mutex_;  // guards what follows, and pid_'s meaning: a reaped number may be reused
  State state_ = State::kRunning;
  int status_ = 0;
};

}  // namespace rm::worker
