// Requests and runs. Waiting is done in slices: in each one the process is looked at, its
// heartbeat, the caller's deadline and the caller's interrupt.
#include <unistd.h>

#include <cstdio>
#include <string_view>

#include "worker/activity.hpp"
#include "worker/client.hpp"

namespace rm::worker {
namespace {

constexpr std::chrono::milliseconds kGrace{1000};  // for a cancelled request to return
constexpr std::chrono::milliseconds kBetweenLogLooks{250};
constexpr size_t kStacksBytes = 4096;              // of a log that ends with the threads' stacks

}  // namespace

/// One call of one thread, from its first wait to its last.
class Worker::Call {
 public:
  Call(Worker& worker, const WaitLimits& limits, const char* what)
      : what(what),
        worker_(worker),
        limits_(limits),
        deadline_(limits.timeout_s),
        heartbeat_(*worker.bell_, worker.options_.heartbeat_timeout_s),
        stall_(worker.pid(), limits.stall_s) {}

  /// While other threads' calls are served. Throws; the worker is not harmed.
  void look_while_queued() const {
    if (deadline_.has_passed()) {
      throw Error(RM_DEADLINE_EXCEEDED,
                  "[worker " + std::string(what) + "] expected a turn within " + limit() +
                      ", got none: the worker was busy with another thread's call; raise the time "
                      "limit or call from one thread",
                  late());
    }
    if (limits_.interrupt) limits_.interrupt();
  }

  /// Throws RM303 when the process has ended or its heartbeat has stopped.
  void check_worker() {
    if (!worker_.process_.alive()) worker_.crashed(what);
    // It does not beat before it is ready: an import takes time.
    if (worker_.ready_.pid != 0 && heartbeat_.has_stopped()) worker_.crashed(what);
  }

  /// A packet of this request came.
  void heard() { stall_.heard(); }
  /// Throws RM309 when the worker beats but does nothing at all any more, and ends it: a call that
  /// waits for ever does not listen.
  void check_progress() {
    if (!stall_.has_stalled(worker_.process_.log_bytes())) return;
    worker_.process_.ask_for_stacks();
    const std::string stacks = worker_.process_.log_tail(kStacksBytes);
    worker_.process_.kill();
    throw Error(RM_DEADLINE_EXCEEDED,
                "[worker " + std::string(what) + "] expected the vendor's software to go on, got " +
                    seconds(stall_.limit_s()) +
                    " in which it neither computed, read, wrote nor reported anything; raise "
                    "stall_timeout_s if it waits for something" +
                    worker_.process_.log_named() + "; the end of its log:\n" + stacks,
                "RM309");
  }

  bool is_late() const { return deadline_.has_passed(); }
  void interrupt() const {
    if (limits_.interrupt) limits_.interrupt();
  }
  [[noreturn]] void give_up(const std::string& advice) const {
    throw Error(RM_DEADLINE_EXCEEDED,
                "[worker " + std::string(what) + "] expected an answer within " + limit() +
                    ", got none; " + advice + worker_.process_.log_named(),
                late());
  }

  /// Which limit the caller may raise. What is neither compiled, loaded nor started touches states
  /// and has an execution's limit.
  const char* advice() const {
    const std::string_view doing = what;
    if (doing == "load") return "raise load_timeout_s";
    return doing == "compile" || doing == "start" ? "raise timeout_s" : "raise execute_timeout_s";
  }

  const char* const what;

 private:
  /// A compiler that is late is another matter than a device that is.
  const char* late() const {
    const std::string_view doing = what;
    return doing == "compile" || doing == "start" ? "RM302" : "RM308";
  }
  std::string limit() const { return seconds(deadline_.timeout_s()); }
  static std::string seconds(double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%g s", value);
    return text;
  }
  Worker& worker_;
  const WaitLimits& limits_;
  const Deadline deadline_;
  HeartbeatWatch heartbeat_;
  StallWatch stall_;
};

/// A process that writes a line a call would fill the memory in a few days.
void Worker::look_after_log() noexcept {
  const auto now = WaitClock::now().time_since_epoch();
  if (now < next_log_look_.load(std::memory_order_relaxed)) return;
  next_log_look_.store(now + kBetweenLogLooks, std::memory_order_relaxed);
  process_.trim_log();
}

void Worker::cancel(uint64_t id) noexcept {
  try {
    const auto until = WaitClock::now() + kGrace;
    if (channel_.send({MessageType::kCancel, id, {}}, kGrace)) {
      while (WaitClock::now() < until && process_.alive()) {
        const auto packet = channel_.receive(kWaitSlice);
        if (packet && packet->request == id && packet->type != MessageType::kProgress) return;
      }
    }
  } catch (...) {
    // It is ending: killed below.
  }
  process_.kill();  // it does not listen; its successor loads again what this one had loaded
}

Bytes Worker::request(const Request& request, const OnProgress& progress,
                      const WaitLimits& limits) {
  check_owner();
  Call call(*this, limits, request.what);
  const auto look = [&call] { call.look_while_queued(); };
  requests_.lock(kWaitSlice, look);
  const std::lock_guard requests(requests_, std::adopt_lock);
  if (request.beside == Beside::kRuns) return exchange(request, progress, call);
  // Only now: a run must not wait for the requests this one waited for.
  const AllLanes nothing_runs(lanes_, kWaitSlice, look);
  return exchange(request, progress, call);
}

Bytes Worker::exchange(const Request& request, const OnProgress& progress, Call& call) {
  const uint64_t id = next_request_++;
  const OutgoingPacket packet(request.type, id, request.body, request.files);
  bool is_sent = false;
  try {
    while (!send_released() || !channel_.send(packet, kWaitSlice)) {  // a full queue: it reads none
      call.check_worker();
      call.check_progress();
      if (call.is_late()) {
        process_.kill();
        call.give_up("it does not read its requests and is restarted");
      }
      call.interrupt();
    }
    is_sent = true;
    return wait_for_answer(id, progress, call);
  } catch (const FileError&) {
    crashed(call.what);
  } catch (const Error& error) {
    if (error.code() == RM_DATA_LOSS && error.reason() == "RM303") {
      process_.kill();  // garbage: its successor starts afresh
    }
    throw;
  } catch (...) {  // the interrupt's, or the caller's progress
    if (is_sent) cancel(id);
    throw;
  }
}

Bytes Worker::wait_for_answer(uint64_t id, const OnProgress& progress, Call& call) {
  auto looked_at = WaitClock::now();
  while (true) {
    auto packet = channel_.receive(kWaitSlice);
    if (packet && packet->request == id) {
      call.heard();
      if (packet->type == MessageType::kDone || packet->type == MessageType::kReady) {
        return std::move(packet->body);
      }
      if (packet->type == MessageType::kFailed) {
        throw Failure::decode(packet->body)
            .error("worker " + std::string(call.what), process_.log_named());
      }
      if (packet->type == MessageType::kProgress && progress) {
        const Progress step = Progress::decode(packet->body);
        progress(step.fraction, step.stage);
      }
    }
    const auto now = WaitClock::now();
    if (now - looked_at < kWaitSlice) continue;  // packets may come faster than that
    looked_at = now;
    look_after_log();
    if (!packet) call.check_worker();
    call.check_progress();
    if (call.is_late()) {
      cancel(id);
      call.give_up(call.advice());
    }
    call.interrupt();
  }
}

Bytes Worker::compile(CompileRequest request, const std::shared_ptr<const Weights>& weights,
                      const OnProgress& progress, const WaitLimits& limits) {
  std::vector<const Fd*> files;
  if (weights) {
    request.constants = weights->slots;
    files.push_back(&weights->memory.file());
  }
  return this->request({MessageType::kCompile, "compile", request.encode(), files}, progress,
                       limits);
}

std::shared_ptr<LoadedProgram> Worker::load(LoadRequest request,
                                            const std::shared_ptr<const Weights>& weights,
                                            const WaitLimits& limits, const Fd* artefact) {
  std::shared_ptr<LoadedProgram> program(new LoadedProgram);
  uint64_t bytes = 0;
  place_slots(request.inputs, bytes);
  place_slots(request.outputs, bytes);
  program->memory_ = SharedMemory(bytes);
  std::vector<const Fd*> files = {&program->memory_.file()};
  if (weights) {
    request.constants = weights->slots;
    files.push_back(&weights->memory.file());
  }
  if (artefact != nullptr) files.push_back(artefact);
  const Bytes answer =
      this->request({MessageType::kLoad, "load", request.encode(), files}, {}, limits);
  Reader in(answer);
  program->handle_ = in.u64();
  in.end();
  program->inputs_ = std::move(request.inputs);
  program->outputs_ = std::move(request.outputs);
  program->weights_ = weights;
  program->worker_ = shared_from_this();
  return program;
}

void Worker::release(MessageType type, uint64_t handle) noexcept {
  try {
    if (!alive()) return;
    {
      const std::lock_guard lock(releases_);
      released_.emplace_back(type, handle);
    }
    // Objects die on any thread, with the interpreter's lock held: a request that is under way and
    // needs that lock must not be waited for. Its successor sends what is left.
    if (!requests_.try_lock()) return;
    const std::lock_guard lock(requests_, std::adopt_lock);
    send_released();
  } catch (...) {
    // A worker that has ended has released everything.
  }
}

bool Worker::send_released() {
  while (true) {
    std::pair<MessageType, uint64_t> next;
    {
      const std::lock_guard lock(releases_);
      if (released_.empty()) return true;
      next = released_.back();
      released_.pop_back();
    }
    const std::string body = Writer().u64(next.second).take();
    if (channel_.send({next.first, next_request_++, body}, std::chrono::milliseconds(0))) continue;
    const std::lock_guard lock(releases_);
    released_.push_back(next);
    return false;  // its queue is full: the next request sends the rest
  }
}

void Worker::execute(uint64_t handle, uint64_t states, const WaitLimits& limits) {
  check_owner();
  Call call(*this, limits, "execute");
  const HeldLane held(lanes_, kWaitSlice, [&call] { call.look_while_queued(); });
  ring_and_wait(held.number(), handle, states, call);
  look_after_log();
  const Doorbell& bell = bell_[held.number()];
  if (bell.code != RM_OK) {
    throw Failure{bell.code, bell.answered_reason(), bell.answered_message()}.error(
        "worker execute", process_.log_named());
  }
}

void Worker::ring_and_wait(size_t lane, uint64_t handle, uint64_t states, Call& call) {
  Doorbell& bell = bell_[lane];
  const uint32_t seen = bell.response.number.load(std::memory_order_acquire);
  const uint32_t number = lane_[lane].next_number++;
  bell.handle = handle;
  bell.states = states;
  bell.request.ring(number);
  while (!bell.response.wait_change(seen, kWaitSlice, lane_[lane].spin)) {
    call.check_worker();
    look_after_log();
    if (call.is_late()) {
      process_.kill();
      call.give_up("the device is restarted");
    }
    try {
      call.interrupt();
    } catch (...) {
      process_.kill();  // an execution cannot be called back
      throw;
    }
  }
  if (bell.response.number.load(std::memory_order_acquire) == number) return;
  process_.kill();
  throw Error(RM_DATA_LOSS, "[worker execute] expected the answer to this request, got another",
              "RM303");
}

}  // namespace rm::worker
