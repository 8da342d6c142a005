// What the worker process of these tests does: this very program, started with --serve.
#include "service.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "worker/doorbell.hpp"

namespace rm::test {
namespace {

constexpr int kMostStates = 700;
std::atomic<int> live_states{0};
std::atomic<int> running{0};

struct Running {
  Running() { ++running; }
  ~Running() { --running; }
};

/// Tensors in plain memory. Refused while a program runs: the client must not ask then.
struct HostStates final : worker::States {
  HostStates() {
    if (++live_states > kMostStates) throw Error(RM_RESOURCE_EXHAUSTED, "too many states", "RM305");
  }
  ~HostStates() override { --live_states; }
  std::vector<std::vector<char>> tensors;
};

class Program final : public worker::Runnable {
 public:
  explicit Program(const worker::LoadJob& job)
      : what_(job.artefact), inputs_(job.inputs), outputs_(job.outputs) {}
  void run(worker::States* states) override {
    const Running counted;
    if (what_ == "meet") {
      static std::barrier meeting(2);
      meeting.arrive_and_wait();
    }
    if (what_ == "sum") {
      auto& held = static_cast<HostStates&>(*states).tensors.at(0);
      for (size_t i = 0; i < held.size() / sizeof(float); ++i) {
        reinterpret_cast<float*>(held.data())[i] += static_cast<float*>(inputs_[0].data)[i];
      }
      std::memcpy(outputs_[0].data, held.data(), held.size());
      return;
    }
    if (what_ == "crash") {
      std::fprintf(stderr, "last words\n");
      std::signal(SIGSEGV, SIG_DFL);  // a sanitizer has a handler of its own
      std::raise(SIGSEGV);
    }
    if (what_ == "exit") _exit(3);
    if (what_ == "nap") std::this_thread::sleep_for(std::chrono::milliseconds(800));
    if (what_ == "hang") std::this_thread::sleep_for(std::chrono::hours(1));
    if (what_ == "error") throw Error(RM_INTERNAL, "device error 7", "RM301");
    for (size_t i = 0; i < std::min(inputs_.size(), outputs_.size()); ++i) {
      std::memcpy(outputs_[i].data, inputs_[i].data, inputs_[i].slot->bytes);
    }
  }

 private:
  const std::string what_;
  const worker::MappedTensors inputs_, outputs_;
};

void must_not_run(const char* what) {
  if (running != 0) throw Error(RM_INTERNAL, std::string(what) + " while a program runs", "RM303");
}

[[noreturn]] void wait_for_ever() {
  std::fprintf(stderr, "about to wait\n");
  while (true) pause();
}

class TestService final : public worker::Service {
 public:
  explicit TestService(size_t executions) : executions_(executions) {}
  size_t executions() override { return executions_; }
  worker::Ready describe() override {
    return {static_cast<uint64_t>(getpid()), "test", "1", "build", "print"};
  }
  worker::Bytes compile(const worker::CompileJob& job) override {
    if (job.program == "crash") std::abort();
    if (job.program == "stuck") wait_for_ever();
    double seconds = 0;
    const bool slow = std::sscanf(job.program.c_str(), "slow %lf", &seconds) == 1;
    const bool deaf = std::sscanf(job.program.c_str(), "deaf %lf", &seconds) == 1;
    for (int i = 0; i < static_cast<int>(seconds * 100); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      if (slow) job.progress(i / (seconds * 100), "waiting");
      if (!deaf && job.cancelled()) throw Error(RM_CANCELLED, "cancelled", "RM302");
    }
    std::string out = job.program;
    for (const auto& constant : job.constants) {
      out.append(static_cast<const char*>(constant.data), constant.slot->bytes);
    }
    return out;
  }
  std::unique_ptr<worker::Runnable> load(const worker::LoadJob& job) override {
    if (job.artefact == "stuck") wait_for_ever();
    if (job.artefact == "bad") throw Error(RM_DATA_LOSS, "a damaged artefact", "RM602");
    return std::make_unique<Program>(job);
  }
  std::unique_ptr<worker::States> make_states(uint64_t, const worker::Slots& slots) override {
    must_not_run("make_states");
    auto made = std::make_unique<HostStates>();
    for (const auto& slot : slots) made->tensors.emplace_back(slot.bytes);
    return made;
  }
  void copy_states(const worker::CopyJob& job) override {  // whole tensors
    must_not_run("copy_states");
    auto* from = static_cast<HostStates*>(job.from);
    auto* to = static_cast<HostStates*>(job.to);
    const size_t count = (from != nullptr ? from : to)->tensors.size();
    for (size_t i = 0; i < count; ++i) {
      void* source = from != nullptr ? from->tensors[i].data() : job.host[i].data;
      void* target = to != nullptr ? to->tensors[i].data() : job.host[i].data;
      std::memcpy(target, source, (from != nullptr ? from : to)->tensors[i].size());
    }
  }

 private:
  const size_t executions_;
};

}  // namespace

void serve_for_tests(int descriptor, size_t executions) {
  TestService service(executions);
  worker::serve(Fd(descriptor), service);
}

}  // namespace rm::test
