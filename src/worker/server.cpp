// Threads: control (compile, load), one for each run that may be under way (a lane of the
// doorbell), and one that watches the parent and beats. All but the last call the service.
#include "worker/server.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "worker/channel.hpp"
#include "worker/doorbell.hpp"
#include "worker/lanes.hpp"
#include "worker/shared_memory.hpp"

namespace rm::worker {
namespace {

using std::chrono::milliseconds;

// Of a worker whose parent is gone. Nobody waits for it, but it holds the device.
constexpr milliseconds kLeavesWithin{200};      // what it runs is nobody's any more
constexpr milliseconds kCleansUpWithin{10000};  // it may remove files of gigabytes

MappedTensors map_slots(const Slots& slots, const SharedMemory& memory) {
  MappedTensors out;
  for (const TensorSlot& slot : slots) {
    slot.check(memory.size());
    out.push_back({&slot, memory.data() + slot.offset});
  }
  return out;
}

/// A loaded program with everything it points into.
struct Loaded {
  LoadRequest request;
  SharedMemory io, weights;
  std::unique_ptr<Runnable> runnable;  // destroyed first
};

Failure failure_of(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return {static_cast<uint32_t>(e.code()), e.reason(), e.what()};
  } catch (const std::bad_alloc&) {
    return {RM_RESOURCE_EXHAUSTED, "RM305", "expected free memory in the worker, got none"};
  } catch (const std::exception& e) {
    return {RM_INTERNAL, "RM303", e.what()};
  } catch (...) {
    return {RM_UNKNOWN, "RM303", "expected std::exception, got another exception"};
  }
}

class Server {
 public:
  Server(Fd socket, Service& service) : channel_(std::move(socket)), service_(service) {}
  ~Server() {
    quit_ = true;
    for (size_t lane = 0; lane < executors_.size(); ++lane) {
      bell_[lane].request.ring(bell_[lane].request.number.load() + 1);  // wakes it
    }
    for (std::thread& executor : executors_) executor.join();
    stage_ = Stage::kCleansUp;
    programs_.clear();
    states_.clear();
    stage_ = Stage::kEnded;
    if (watcher_.joinable()) watcher_.join();
  }

  void run() {
    try {
      while (true) {
        auto packet = channel_.receive(milliseconds(1000));
        if (!packet) continue;
        if (packet->type == MessageType::kQuit) return;
        answer(std::move(*packet));
      }
    } catch (const FileError& error) {
      if (error.errno_value() != ECONNRESET && error.errno_value() != EPIPE) throw;
    }
  }

 private:
  enum class Stage { kServes, kCleansUp, kEnded };

  void answer(Packet packet) {
    const uint64_t id = packet.request;
    Bytes reply;
    MessageType type = MessageType::kDone;
    try {
      switch (packet.type) {
        case MessageType::kHello:
          type = MessageType::kReady;
          reply = hello(std::move(packet));
          break;
        case MessageType::kCompile:
          reply = compile(std::move(packet));
          break;
        case MessageType::kLoad:
          reply = load(std::move(packet));
          break;
        case MessageType::kUnload:
          release(programs_, packet.body);
          return;
        case MessageType::kMakeStates:
          reply = make_states(packet);
          break;
        case MessageType::kFreeStates:
          release(states_, packet.body);
          return;
        case MessageType::kCopyStates:
          copy_states(std::move(packet));
          break;
        case MessageType::kCancel:  // of a request that was answered meanwhile
          return;
        default:
          throw Error(RM_DATA_LOSS, "[worker] expected a request, got an answer", "RM303");
      }
    } catch (const FileError&) {
      throw;
    } catch (...) {
      type = MessageType::kFailed;
      reply = failure_of(std::current_exception()).encode();
    }
    const auto packet_out = OutgoingPacket::of(type, id, reply);
    while (!channel_.send(packet_out, milliseconds(1000))) {  // a client that is stopped: it waits
    }
  }

  std::string hello(Packet packet) {
    if (packet.files.size() != 1 || bell_ != nullptr) {
      throw Error(RM_DATA_LOSS, "[worker] expected one hello with one descriptor", "RM303");
    }
    page_ = SharedMemory(std::move(packet.files[0]), true);
    bell_ = reinterpret_cast<Doorbell*>(page_.data());
    if (page_.size() < Lanes::kMost * sizeof(Doorbell) || bell_->magic != Doorbell::kMagic ||
        bell_->version != kProtocolVersion) {
      bell_ = nullptr;
      throw Error(RM_FAILED_PRECONDITION,
                  "[worker] expected the doorbell of this protocol, got another; install the same "
                  "rm_abstract in the worker's environment",
                  "RM403");
    }
    watcher_ = std::thread([this, parent = getppid()] { watch(parent); });
    const std::string ready = service_.describe().encode();
    const size_t lanes = std::clamp<size_t>(service_.executions(), 1, Lanes::kMost);
    bell_->lanes = static_cast<uint32_t>(lanes);
    for (size_t lane = 0; lane < lanes; ++lane) {
      executors_.emplace_back([this, lane] { execute_loop(bell_[lane]); });
    }
    return ready;
  }

  Bytes compile(Packet packet) {
    const CompileRequest request = CompileRequest::decode(packet.body);
    SharedMemory weights;
    if (!request.constants.empty()) weights = SharedMemory(std::move(packet.files.at(0)), false);
    CompileJob job{request.device,
                   request.program,
                   request.options,
                   map_slots(request.constants, weights),
                   {},
                   {}};
    job.progress = [&](double fraction, std::string_view stage) {
      // Dropped when the client does not read: a report is not worth a compiler's time.
      const std::string body = Progress{fraction, std::string(stage)}.encode();
      channel_.send({MessageType::kProgress, packet.request, body}, milliseconds(0));
    };
    bool cancelled = false;
    job.cancelled = [&] {
      // Only a cancel can come while the client waits for this answer.
      if (!cancelled) {
        const auto next = channel_.receive(milliseconds(0));
        cancelled = next && next->type == MessageType::kCancel;
      }
      return cancelled;
    };
    return service_.compile(job);
  }

  std::string load(Packet packet) {
    auto loaded = std::make_shared<Loaded>();
    loaded->request = LoadRequest::decode(packet.body);
    loaded->io = SharedMemory(std::move(packet.files.at(0)), true);
    if (!loaded->request.constants.empty()) {
      loaded->weights = SharedMemory(std::move(packet.files.at(1)), false);
    }
    const LoadRequest& request = loaded->request;
    std::optional<MappedPart> file;
    if (request.file_bytes > 0) {
      if (packet.files.empty() || !packet.files.back()) {
        throw Error(RM_DATA_LOSS, "[worker] expected the artefact's file, got none", "RM303");
      }
      file.emplace(packet.files.back(), request.file_offset, request.file_bytes);
    }
    const LoadJob job{request.device,
                      file ? file->view() : std::string_view(request.artefact),
                      map_slots(request.constants, loaded->weights),
                      map_slots(request.inputs, loaded->io),
                      map_slots(request.outputs, loaded->io),
                      request.states};
    loaded->runnable = service_.load(job);
    return keep(programs_, std::move(loaded));
  }

  std::string make_states(const Packet& packet) {
    const StatesRequest request = StatesRequest::decode(packet.body);
    for (const TensorSlot& slot : request.slots) slot.check(std::numeric_limits<uint64_t>::max());
    std::shared_ptr<States> made = service_.make_states(request.device, request.slots);
    return keep(states_, std::move(made));
  }

  void copy_states(Packet packet) {
    const CopyStatesRequest request = CopyStatesRequest::decode(packet.body);
    if (request.from == 0 && request.to == 0) {
      throw Error(RM_DATA_LOSS, "[worker] expected a copy of states, got none", "RM303");
    }
    SharedMemory memory;
    const bool uses_host = request.from == 0 || request.to == 0;
    if (uses_host) memory = SharedMemory(std::move(packet.files.at(0)), true);
    const auto from = find(states_, request.from, "states");
    const auto to = find(states_, request.to, "states");
    CopyJob job{from.get(), to.get(), request.region, {}};
    if (uses_host) job.host = map_slots(request.host, memory);
    service_.copy_states(job);
  }

  template <class T>
  using Handles = std::map<uint64_t, std::shared_ptr<T>>;

  template <class T>
  std::string keep(Handles<T>& handles, std::shared_ptr<T> object) {
    const std::lock_guard lock(mutex_);
    const uint64_t handle = next_handle_++;
    handles[handle] = std::move(object);
    return Writer().u64(handle).take();
  }

  template <class T>
  void release(Handles<T>& handles, std::string_view body) {
    const uint64_t handle = Reader(body).u64();
    std::shared_ptr<T> gone;  // destroyed outside the lock, and after a run that uses it
    const std::lock_guard lock(mutex_);
    if (const auto at = handles.find(handle); at != handles.end()) {
      gone = std::move(at->second);
      handles.erase(at);
    }
  }

  /// nullptr for 0.
  template <class T>
  std::shared_ptr<T> find(const Handles<T>& handles, uint64_t handle, const char* what) {
    if (handle == 0) return nullptr;
    const std::lock_guard lock(mutex_);
    const auto at = handles.find(handle);
    if (at != handles.end()) return at->second;
    throw Error(RM_NOT_FOUND, std::string("expected known ") + what + ", got an unknown handle",
                "RM303");
  }

  void execute_loop(Doorbell& bell) {
    uint32_t seen = 0;
    SpinBudget spin;
    while (!quit_) {
      bell.request.wait_change(seen, kForever, spin);
      if (quit_) return;
      seen = bell.request.number.load(std::memory_order_acquire);
      try {
        execute(bell.handle, bell.states);
        bell.answer(RM_OK, {}, {});
      } catch (...) {
        const Failure failure = failure_of(std::current_exception());
        bell.answer(failure.code, failure.reason, failure.message);
      }
      bell.response.ring(seen);
    }
  }

  void execute(uint64_t handle, uint64_t states) {
    const auto program = find(programs_, handle, "programs");
    if (!program)
      throw Error(RM_NOT_FOUND, "expected a loaded program, got an unknown handle", "RM303");
    program->runnable->run(find(states_, states, "states").get());
  }

  /// Beats, and ends this process and its children when the parent is gone.
  void watch(pid_t parent) {
    while (stage_ != Stage::kEnded) {
      bell_->heartbeat.fetch_add(1, std::memory_order_relaxed);
      pollfd end{channel_.socket().get(), POLLRDHUP, 0};
      const int ready = poll(&end, 1, 100);
      const bool closed = ready > 0 && (end.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
      if (!closed && getppid() == parent) continue;
      // The control thread sees it too, and leaves by itself unless something does not return.
      if (gets_beyond(Stage::kServes, kLeavesWithin)) gets_beyond(Stage::kCleansUp, kCleansUpWithin);
      if (stage_ != Stage::kEnded) ::kill(0, SIGKILL);  // our session: compilers we started too
    }
  }

  bool gets_beyond(Stage stage, milliseconds limit) const {
    const auto until = std::chrono::steady_clock::now() + limit;
    while (stage_ == stage && std::chrono::steady_clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(5));
    }
    return stage_ != stage;
  }

  Channel channel_;
  Service& service_;
  SharedMemory page_;
  Doorbell* bell_ = nullptr;
  std::atomic<bool> quit_{false};  // executors return when they are done
  std::atomic<Stage> stage_{Stage::kServes};
  std::mutex mutex_;  // guards programs_ and states_
  Handles<Loaded> programs_;
  Handles<States> states_;
  uint64_t next_handle_ = 1;
  std::vector<std::thread> executors_;
  std::thread watcher_;
};

}  // namespace

void serve(Fd socket, Service& service) {
  Server server(std::move(socket), service);
  server.run();
}

}  // namespace rm::worker
