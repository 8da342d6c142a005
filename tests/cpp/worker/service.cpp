// What the worker process of these tests does: this very program, started with --serve.
#include "service.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "worker/doorbell.hpp"

namespace rm::test {
namespace {

class Program final : public worker::Runnable {
 public:
  explicit Program(const worker::LoadJob& job)
      : what_(job.artefact), inputs_(job.inputs), outputs_(job.outputs) {}
  void run() override {
    if (what_ == "crash") {
      std::fprintf(stderr, "last words\n");
      std::raise(SIGSEGV);
    }
    if (what_ == "exit") _exit(3);
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

class TestService final : public worker::Service {
 public:
  worker::Ready describe() override {
    return {static_cast<uint64_t>(getpid()), "test", "1", "build", "print"};
  }
  std::string compile(const worker::CompileJob& job) override {
    if (job.program == "crash") std::abort();
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
    if (job.artefact == "bad") throw Error(RM_DATA_LOSS, "a damaged artefact", "RM602");
    return std::make_unique<Program>(job);
  }
};

}  // namespace

void serve_for_tests(int descriptor) {
  TestService service;
  worker::serve(Fd(descriptor), service);
}

}  // namespace rm::test
