// A worker process as its user sees it: started, asked to compile, load and execute, watched, and
// gone without a trace when the object is.
//
// Invariant: whatever the worker does (crash, hang, garbage, being stopped) becomes an rm::Error
// with the tail of its log; this process neither crashes nor waits longer than it was told to.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "worker/channel.hpp"
#include "worker/doorbell.hpp"
#include "worker/process.hpp"
#include "worker/protocol.hpp"
#include "worker/shared_memory.hpp"

namespace rm::worker {

/// Called a few times a second while waiting, outside all locks of ours; what it throws cancels
/// the request (Ctrl-C).
using Interrupt = std::function<void()>;
using OnProgress = std::function<void(double fraction, const std::string& stage)>;

/// Seconds; 0 waits for ever.
struct Patience {
  double timeout_s = 0;
  Interrupt interrupt;
};

/// Tensors of one model in shared memory, written once and mapped by every program that uses them.
struct Weights {
  SharedMemory memory;
  Slots slots;
};

class Worker;

/// A program loaded in a worker. Its inputs and outputs lie in `memory()`.
class LoadedProgram {
 public:
  ~LoadedProgram();
  LoadedProgram(const LoadedProgram&) = delete;
  LoadedProgram& operator=(const LoadedProgram&) = delete;

  SharedMemory& memory() noexcept { return memory_; }
  const Slots& inputs() const noexcept { return inputs_; }
  const Slots& outputs() const noexcept { return outputs_; }
  /// Runs it on what the inputs hold. One at a time in a worker; callers keep the memory to
  /// themselves meanwhile.
  void execute(const Patience& patience);

 private:
  friend class Worker;
  LoadedProgram() = default;
  std::shared_ptr<Worker> worker_;
  std::shared_ptr<const Weights> weights_;
  SharedMemory memory_;
  Slots inputs_, outputs_;
  uint64_t handle_ = 0;
};

class Worker : public std::enable_shared_from_this<Worker> {
 public:
  struct Options {
    ChildProcess::Options process;
    double start_timeout_s = 120;     ///< until it says that it is ready (an SDK's import)
    double heartbeat_timeout_s = 30;  ///< a process that is not scheduled for so long is given up
  };
  /// Starts it and waits until it is ready.
  static std::shared_ptr<Worker> start(const Options& options, const Interrupt& interrupt);
  ~Worker();

  const Ready& ready() const noexcept { return ready_; }
  bool alive();
  pid_t pid() const noexcept { return process_.pid(); }
  std::string log_tail() { return process_.log_tail(); }

  /// The artefact. Throws the worker's own error, RM302 after the time-out, RM303 after a crash.
  std::string compile(CompileRequest request, const std::shared_ptr<const Weights>& weights,
                      const OnProgress& progress, const Patience& patience);
  /// `inputs` and `outputs` need dtype and dims only.
  std::shared_ptr<LoadedProgram> load(LoadRequest request,
                                      const std::shared_ptr<const Weights>& weights,
                                      const Patience& patience);
  /// Asks it to end, then kills it.
  void stop() noexcept;

 private:
  friend class LoadedProgram;
  explicit Worker(const Options& options);
  Worker(const Options& options, std::pair<Fd, Fd> ends);
  void check_owner() const;
  void greet(const Interrupt& interrupt);
  std::string request(MessageType type, const std::string& body,
                      const std::vector<const Fd*>& files, const OnProgress& progress,
                      const Patience& patience, const std::string& what);
  std::string wait_for_answer(uint64_t id, const OnProgress& progress, const Patience& patience,
                              const std::string& what, std::optional<Failure>& failure);
  void cancel(uint64_t id) noexcept;
  void execute(uint64_t handle, const Patience& patience);
  void unload(uint64_t handle) noexcept;
  bool frozen();
  [[noreturn]] void crashed(const std::string& what);

  const Options options_;
  const pid_t owner_;
  ChildProcess process_;
  Channel channel_;
  SharedMemory page_;
  Doorbell* bell_ = nullptr;
  Ready ready_;
  std::mutex requests_;    // one control request at a time
  std::mutex executions_;  // one execution at a time
  uint64_t next_request_ = 1;
  uint32_t next_number_ = 1;
  SpinBudget spin_;  // guarded by executions_
  uint64_t last_beat_ = 0;
  std::chrono::steady_clock::time_point last_beat_at_;
};

}  // namespace rm::worker
