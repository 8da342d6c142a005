// Waiting is done in slices: in each one the process is looked at, the deadline and the interrupt.
#include "worker/client.hpp"

#include <unistd.h>

#include <cerrno>
#include <new>

namespace rm::worker {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kSlice = std::chrono::milliseconds(50);
constexpr auto kGrace = std::chrono::milliseconds(1000);  // for a cancelled request to return

Clock::time_point deadline_of(double seconds) {
  if (seconds <= 0) return Clock::time_point::max();
  return Clock::now() +
         std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

void place_slots(Slots& slots, uint64_t& offset) {
  for (TensorSlot& slot : slots) {
    slot.bytes = tensor_bytes(slot.dtype, slot.dims);
    slot.offset = offset;
    offset += align_slot(slot.bytes);
  }
}

Worker::Worker(const Options& options) : Worker(options, Channel::make_pair()) {}

Worker::Worker(const Options& options, std::pair<Fd, Fd> ends)
    : options_(options),
      owner_(getpid()),
      process_(options.process, ends.second),
      channel_(std::move(ends.first)),
      page_(sizeof(Doorbell)),
      last_beat_at_(Clock::now()) {
  bell_ = new (page_.data()) Doorbell{};
  bell_->magic = Doorbell::kMagic;
  bell_->version = kProtocolVersion;
}

std::shared_ptr<Worker> Worker::start(const Options& options, const Interrupt& interrupt) {
  std::shared_ptr<Worker> worker(new Worker(options));
  worker->greet(interrupt);
  return worker;
}

Worker::~Worker() { stop(); }

void Worker::greet(const Interrupt& interrupt) {
  const std::string body = request(MessageType::kHello, {}, {&page_.file()}, {},
                                   {options_.start_timeout_s, interrupt}, "start");
  ready_ = Ready::decode(body);
}

void Worker::check_owner() const {
  if (getpid() != owner_) {
    throw Error(RM_FAILED_PRECONDITION,
                "[worker] expected the process that started the worker, got a forked child; try "
                "rm_abstract.init() in the child",
                "RM303");
  }
}

bool Worker::alive() { return getpid() == owner_ && process_.alive(); }

void Worker::stop() noexcept {
  if (getpid() != owner_) return;
  try {
    if (process_.alive()) {
      channel_.send(MessageType::kQuit, 0, {});
      process_.wait_for(std::chrono::milliseconds(500));
    }
  } catch (...) {
    // Its end of the socket is closed already: killing is what is left.
  }
  process_.kill();
}

void Worker::crashed(const std::string& what) {
  process_.wait_for(std::chrono::milliseconds(200));
  const std::string ending = process_.ending();
  process_.kill();
  std::string log = process_.log_tail();
  while (!log.empty() && log.back() == '\n') log.pop_back();
  throw Error(RM_UNAVAILABLE,
              "[worker " + what + "] expected an answer, got " +
                  (ending.empty() ? "a process that stopped answering" : ending) +
                  (log.empty() ? "; its log is empty" : "; the end of its log:\n" + log),
              "RM303");
}

bool Worker::frozen() {
  if (ready_.pid == 0) return false;  // it does not beat before it is ready: an import takes time
  const uint64_t beat = bell_->heartbeat.load(std::memory_order_relaxed);
  const auto now = Clock::now();
  if (beat != last_beat_) {
    last_beat_ = beat;
    last_beat_at_ = now;
  }
  return now - last_beat_at_ > std::chrono::duration<double>(options_.heartbeat_timeout_s);
}

void Worker::cancel(uint64_t id) noexcept {
  try {
    channel_.send(MessageType::kCancel, id, {});
    const auto until = Clock::now() + kGrace;
    while (Clock::now() < until && process_.alive()) {
      const auto packet = channel_.receive(kSlice);
      if (packet && packet->request == id && packet->type != MessageType::kProgress) return;
    }
  } catch (...) {
    // It is going down: the same end.
  }
  process_.kill();  // it does not listen; what it had loaded is loaded again by its successor
}

std::string Worker::request(MessageType type, const std::string& body,
                            const std::vector<const Fd*>& files, const OnProgress& progress,
                            const Patience& patience, const std::string& what) {
  check_owner();
  const std::lock_guard lock(requests_);
  const uint64_t id = next_request_++;
  last_beat_at_ = Clock::now();
  std::optional<Failure> failure;
  try {
    send_released();
    channel_.send(type, id, body, files);
    const std::string answer = wait_for_answer(id, progress, patience, what, failure);
    if (!failure) return answer;
  } catch (const FileError&) {
    crashed(what);
  } catch (const Error& error) {
    if (error.code() == RM_DATA_LOSS) process_.kill();  // garbage: its successor starts afresh
    throw;
  } catch (...) {  // the interrupt's, or the caller's progress
    cancel(id);
    throw;
  }
  throw failure->error("worker " + what);
}

std::string Worker::wait_for_answer(uint64_t id, const OnProgress& progress,
                                    const Patience& patience, const std::string& what,
                                    std::optional<Failure>& failure) {
  const auto deadline = deadline_of(patience.timeout_s);
  auto looked_at = Clock::now();
  while (true) {
    const auto packet = channel_.receive(kSlice);
    if (packet && packet->request == id) {
      if (packet->type == MessageType::kDone || packet->type == MessageType::kReady) {
        return packet->body;
      }
      if (packet->type == MessageType::kFailed) {
        failure = Failure::decode(packet->body);
        return {};
      }
      if (packet->type == MessageType::kProgress && progress) {
        const Progress step = Progress::decode(packet->body);
        progress(step.fraction, step.stage);
      }
    }
    const auto now = Clock::now();
    if (now - looked_at < kSlice) continue;  // packets may come faster than that
    looked_at = now;
    if (!packet && (!process_.alive() || frozen())) crashed(what);
    if (now > deadline) {
      cancel(id);
      throw Error(RM_DEADLINE_EXCEEDED,
                  "[worker " + what + "] expected an answer within " +
                      std::to_string(patience.timeout_s) + " s, got none; raise timeout_s",
                  "RM302");
    }
    if (patience.interrupt) patience.interrupt();
  }
}

std::string Worker::compile(CompileRequest request, const std::shared_ptr<const Weights>& weights,
                            const OnProgress& progress, const Patience& patience) {
  std::vector<const Fd*> files;
  if (weights) {
    request.constants = weights->slots;
    files.push_back(&weights->memory.file());
  }
  return this->request(MessageType::kCompile, request.encode(), files, progress, patience,
                       "compile");
}

std::shared_ptr<LoadedProgram> Worker::load(LoadRequest request,
                                            const std::shared_ptr<const Weights>& weights,
                                            const Patience& patience) {
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
  const std::string answer =
      this->request(MessageType::kLoad, request.encode(), files, {}, patience, "load");
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
    const std::unique_lock lock(requests_, std::try_to_lock);
    if (lock.owns_lock()) send_released();
  } catch (...) {
    // A worker that is gone has released everything.
  }
}

void Worker::send_released() {
  std::vector<std::pair<MessageType, uint64_t>> released;
  {
    const std::lock_guard lock(releases_);
    released.swap(released_);
  }
  for (const auto& [type, handle] : released) {
    channel_.send(type, next_request_++, Writer().u64(handle).take());
  }
}

void Worker::execute(uint64_t handle, uint64_t states, const Patience& patience) {
  check_owner();
  const std::lock_guard lock(executions_);
  const auto deadline = deadline_of(patience.timeout_s);
  const uint32_t seen = bell_->response.number.load(std::memory_order_acquire);
  const uint32_t number = next_number_++;
  bell_->handle = handle;
  bell_->states = states;
  last_beat_at_ = Clock::now();
  bell_->request.ring(number);
  while (!bell_->response.wait_change(seen, kSlice, spin_)) {
    if (!process_.alive() || frozen()) crashed("execute");
    if (Clock::now() > deadline) {
      process_.kill();
      throw Error(RM_DEADLINE_EXCEEDED,
                  "[worker execute] expected an answer within " +
                      std::to_string(patience.timeout_s) + " s, got none; the device is restarted",
                  "RM302");
    }
    if (!patience.interrupt) continue;
    try {
      patience.interrupt();
    } catch (...) {
      process_.kill();  // an execution cannot be called back
      throw;
    }
  }
  if (bell_->response.number.load(std::memory_order_acquire) != number) {
    process_.kill();
    throw Error(RM_DATA_LOSS, "[worker execute] expected the answer to this request, got another",
                "RM303");
  }
  if (bell_->code != RM_OK) {
    throw Failure{bell_->code, bell_->answered_reason(), bell_->answered_message()}.error(
        "worker execute");
  }
}

}  // namespace rm::worker
