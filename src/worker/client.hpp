// A worker process as its user sees it: started, asked to compile, load and execute, watched, and
// gone without a trace when the object is.
//
// Invariant: whatever the worker does (crash, hang, garbage, being stopped) becomes an rm::Error
// with the tail of its log; this process neither crashes nor waits beyond the caller's WaitLimits,
// which covers the waits for other threads' calls too. All functions may be called by any thread.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "worker/channel.hpp"
#include "worker/doorbell.hpp"
#include "worker/lanes.hpp"
#include "worker/patient_mutex.hpp"
#include "worker/process.hpp"
#include "worker/protocol.hpp"
#include "worker/shared_memory.hpp"
#include "worker/wait.hpp"

namespace rm::worker {

using OnProgress = std::function<void(double fraction, const std::string& stage)>;

/// Gives every slot its size and its place from `offset` on, one after the other.
void place_slots(Slots& slots, uint64_t& offset);

/// Tensors of one model in shared memory, written once and mapped by every program that uses them.
struct Weights {
  SharedMemory memory;
  Slots slots;
  /// Tells the digest of every tensor as it is now. Takes as long as reading the memory once.
  void digest();
};

class Worker;

/// Tensors that stay on the device between runs, updated in place by the programs that are given
/// them. Lost with the worker, freed with this object.
class StateSet {
 public:
  ~StateSet();
  StateSet(const StateSet&) = delete;
  StateSet& operator=(const StateSet&) = delete;

  const Slots& slots() const noexcept { return slots_; }
  /// False when the worker that held them has ended.
  bool alive() const;
  /// Copies a part of `from`, which lies in the same worker, on the device.
  void copy_from(const StateSet& from, const StatesRegion& region, const WaitLimits& limits);
  /// Copies a part from or to shared memory of this process.
  void read(const Weights& to, const StatesRegion& region, const WaitLimits& limits) const;
  void write(const Weights& from, const StatesRegion& region, const WaitLimits& limits);

 private:
  friend class Worker;
  friend class LoadedProgram;
  StateSet() = default;
  std::shared_ptr<Worker> worker_;
  Slots slots_;
  uint64_t handle_ = 0;
};

/// A program loaded in a worker. Its inputs and outputs lie in `memory()`.
class LoadedProgram {
 public:
  ~LoadedProgram();
  LoadedProgram(const LoadedProgram&) = delete;
  LoadedProgram& operator=(const LoadedProgram&) = delete;

  SharedMemory& memory() noexcept { return memory_; }
  const Slots& inputs() const noexcept { return inputs_; }
  const Slots& outputs() const noexcept { return outputs_; }
  /// Runs it on what the inputs hold; callers keep the memory to themselves meanwhile. As many
  /// programs run at once as the worker takes, the others wait for their turn.
  /// `states` (of the same worker, or nullptr) are what its donated inputs are.
  void execute(const WaitLimits& limits, const StateSet* states = nullptr);

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
    double start_stall_s = 0;         ///< how long it may do nothing at all meanwhile; 0: for ever
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
  Bytes compile(CompileRequest request, const std::shared_ptr<const Weights>& weights,
                const OnProgress& progress, const WaitLimits& limits);
  /// `inputs` and `outputs` need dtype and dims only. `artefact` is the file of an artefact that
  /// lies in one (request.file_bytes), else nullptr.
  std::shared_ptr<LoadedProgram> load(LoadRequest request,
                                      const std::shared_ptr<const Weights>& weights,
                                      const WaitLimits& limits, const Fd* artefact = nullptr);
  /// Zeros of these types on the device.
  std::shared_ptr<StateSet> make_states(uint64_t device, Slots slots, const WaitLimits& limits);
  /// Asks it to end, then kills it.
  void stop() noexcept;

 private:
  friend class LoadedProgram;
  friend class StateSet;
  /// Whether a request may be served while a program runs.
  enum class Beside { kRuns, kNothing };
  /// A control request and what to call it in messages.
  struct Request {
    MessageType type;
    const char* what;
    std::string body;
    std::vector<const Fd*> files = {};
    Beside beside = Beside::kRuns;
  };
  class Call;

  explicit Worker(const Options& options);
  Worker(const Options& options, std::pair<Fd, Fd> ends);
  void check_owner() const;
  void greet(const Interrupt& interrupt);
  Bytes request(const Request& request, const OnProgress& progress, const WaitLimits& limits);
  Bytes exchange(const Request& request, const OnProgress& progress, Call& call);
  Bytes wait_for_answer(uint64_t id, const OnProgress& progress, Call& call);
  void cancel(uint64_t id) noexcept;
  void execute(uint64_t handle, uint64_t states, const WaitLimits& limits);
  void ring_and_wait(size_t lane, uint64_t handle, uint64_t states, Call& call);
  void copy_states(const CopyStatesRequest& request, const Fd* host, const WaitLimits& limits);
  void release(MessageType type, uint64_t handle) noexcept;
  bool send_released();
  void look_after_log() noexcept;
  [[noreturn]] void crashed(const std::string& what);

  const Options options_;
  const pid_t owner_;
  ChildProcess process_;
  Channel channel_;
  SharedMemory page_;
  Doorbell* bell_ = nullptr;  // of every lane
  Ready ready_;  // written before start() returns
  // Locked in this order. Messages are sent and received by the holder of `requests_`.
  PatientMutex requests_;  // one control request at a time
  Lanes lanes_;            // of executions
  uint64_t next_request_ = 1;  // guarded by requests_
  std::mutex releases_;        // guards released_
  std::vector<std::pair<MessageType, uint64_t>> released_;
  struct Lane {  // the holder's
    uint32_t next_number = 1;
    SpinBudget spin;
  };
  std::array<Lane, Lanes::kMost> lane_;
  std::atomic<WaitClock::duration> next_log_look_{};
};

}  // namespace rm::worker
