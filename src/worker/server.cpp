// Three threads: control (compile, load), execution (the doorbell), and one that watches the parent
// and beats. Only the first and second call the service.
#include "worker/server.hpp"

#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <map>
#include <mutex>
#include <thread>

#include "worker/channel.hpp"
#include "worker/doorbell.hpp"
#include "worker/shared_memory.hpp"

namespace rm::worker {
namespace {

using std::chrono::milliseconds;

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
    if (bell_ != nullptr) bell_->request.ring(bell_->request.number.load() + 1);  // wakes it
    if (executor_.joinable()) executor_.join();
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
  void answer(Packet packet) {
    const uint64_t id = packet.request;
    std::string reply;
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
          unload(packet.body);
          return;
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
    channel_.send(type, id, reply);
  }

  std::string hello(Packet packet) {
    if (packet.files.size() != 1 || bell_ != nullptr) {
      throw Error(RM_DATA_LOSS, "[worker] expected one hello with one descriptor", "RM303");
    }
    page_ = SharedMemory(std::move(packet.files[0]), true);
    bell_ = reinterpret_cast<Doorbell*>(page_.data());
    if (page_.size() < sizeof(Doorbell) || bell_->magic != Doorbell::kMagic ||
        bell_->version != kProtocolVersion) {
      bell_ = nullptr;
      throw Error(RM_FAILED_PRECONDITION,
                  "[worker] expected the doorbell of this protocol, got another; install the same "
                  "rm_abstract in the worker's environment",
                  "RM403");
    }
    watcher_ = std::thread([this, parent = getppid()] { watch(parent); });
    const std::string ready = service_.describe().encode();
    executor_ = std::thread([this] { execute_loop(); });
    return ready;
  }

  std::string compile(Packet packet) {
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
      channel_.send(MessageType::kProgress, packet.request,
                    Progress{fraction, std::string(stage)}.encode());
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
    const LoadJob job{
        request.device, request.artefact, map_slots(request.constants, loaded->weights),
        map_slots(request.inputs, loaded->io), map_slots(request.outputs, loaded->io)};
    loaded->runnable = service_.load(job);
    const std::lock_guard lock(mutex_);
    const uint64_t handle = next_handle_++;
    programs_[handle] = std::move(loaded);
    Writer out;
    return out.u64(handle).take();
  }

  void unload(const std::string& body) {
    Reader in(body);
    const uint64_t handle = in.u64();
    std::shared_ptr<Loaded> gone;  // destroyed outside the lock, and after a run that uses it
    const std::lock_guard lock(mutex_);
    if (const auto at = programs_.find(handle); at != programs_.end()) {
      gone = std::move(at->second);
      programs_.erase(at);
    }
  }

  void execute_loop() {
    uint32_t seen = 0;
    SpinBudget spin;
    while (!quit_) {
      bell_->request.wait_change(seen, kForever, spin);
      if (quit_) return;
      seen = bell_->request.number.load(std::memory_order_acquire);
      try {
        execute(bell_->handle);
        bell_->answer(RM_OK, {}, {});
      } catch (...) {
        const Failure failure = failure_of(std::current_exception());
        bell_->answer(failure.code, failure.reason, failure.message);
      }
      bell_->response.ring(seen);
    }
  }

  void execute(uint64_t handle) {
    std::shared_ptr<Loaded> program;
    {
      const std::lock_guard lock(mutex_);
      const auto at = programs_.find(handle);
      if (at != programs_.end()) program = at->second;
    }
    if (!program)
      throw Error(RM_NOT_FOUND, "expected a loaded program, got an unknown handle", "RM303");
    program->runnable->run();
  }

  /// Beats, and ends this process and its children when the parent is gone.
  void watch(pid_t parent) {
    while (!quit_) {
      bell_->heartbeat.fetch_add(1, std::memory_order_relaxed);
      pollfd end{channel_.socket().get(), POLLRDHUP, 0};
      const int ready = poll(&end, 1, 100);
      const bool closed = ready > 0 && (end.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
      if ((closed || getppid() != parent) && !quit_) {
        std::this_thread::sleep_for(milliseconds(200));  // the control thread may be leaving
        if (!quit_) ::kill(0, SIGKILL);                  // our session: compilers we started too
      }
    }
  }

  Channel channel_;
  Service& service_;
  SharedMemory page_;
  Doorbell* bell_ = nullptr;
  std::atomic<bool> quit_{false};
  std::mutex mutex_;  // guards programs_
  std::map<uint64_t, std::shared_ptr<Loaded>> programs_;
  uint64_t next_handle_ = 1;
  std::thread executor_, watcher_;
};

}  // namespace

void serve(Fd socket, Service& service) {
  Server server(std::move(socket), service);
  server.run();
}

}  // namespace rm::worker
