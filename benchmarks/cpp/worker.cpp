// What a call through a worker process costs: a round trip of a small program against a bare
// two-process eventfd ping-pong of the same run, and large tensors against a copy probe.
//
//   worker_bench [rounds]      prints one JSON object; all times in microseconds
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "worker/client.hpp"
#include "worker/server.hpp"

namespace {

using namespace rm::worker;
using Clock = std::chrono::steady_clock;

/// Copies nothing: the tensors' places are what both sides see.
class Nothing final : public Runnable {
 public:
  void run(States* /*none*/) override {}
};

class BenchService final : public Service {
 public:
  Ready describe() override { return {static_cast<uint64_t>(getpid()), "bench", "1", "", ""}; }
  Bytes compile(const CompileJob&) override { return std::string(); }
  std::unique_ptr<Runnable> load(const LoadJob&) override { return std::make_unique<Nothing>(); }
  std::unique_ptr<States> make_states(uint64_t, const Slots&) override { return nullptr; }
  void copy_states(const CopyJob&) override {}
};

double now_us() {
  return std::chrono::duration<double, std::micro>(Clock::now().time_since_epoch()).count();
}

template <class Body>
std::vector<double> sample(int rounds, Body&& body) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const double start = now_us();
    body();
    times.push_back(now_us() - start);
  }
  std::sort(times.begin(), times.end());
  return times;
}

double at(const std::vector<double>& sorted, double q) {
  return sorted[std::min(sorted.size() - 1,
                         static_cast<size_t>(q * static_cast<double>(sorted.size())))];
}

void print(const char* name, const std::vector<double>& t) {
  std::printf("  \"%s\": {\"p10\": %.2f, \"p50\": %.2f, \"p90\": %.2f, \"p99\": %.2f},\n", name,
              at(t, 0.1), at(t, 0.5), at(t, 0.9), at(t, 0.99));
}

std::vector<double> ping_pong(int rounds) {
  const int there = eventfd(0, 0), back = eventfd(0, 0);
  const pid_t child = fork();
  uint64_t value = 0;
  if (child == 0) {
    for (int i = 0; i < rounds; ++i) {
      if (read(there, &value, 8) != 8 || write(back, &value, 8) != 8) _exit(1);
    }
    _exit(0);
  }
  auto times = sample(rounds, [&] {
    value = 1;
    if (write(there, &value, 8) != 8 || read(back, &value, 8) != 8) std::abort();
  });
  waitpid(child, nullptr, 0);
  close(there);
  close(back);
  return times;
}

std::shared_ptr<LoadedProgram> load(Worker& worker, int64_t bytes) {
  TensorSlot slot{"", {kDLUInt, 8, 1}, {bytes}, 0, 0, ""};
  return worker.load({0, "", {}, {slot}, {slot}}, nullptr, {60, {}});
}

/// One call as the engine makes it: input copied in, program run, output copied out.
void call(LoadedProgram& program, const char* in, char* out, size_t bytes) {
  std::memcpy(program.memory().data() + program.inputs()[0].offset, in, bytes);
  program.execute({60, {}});
  std::memcpy(out, program.memory().data() + program.outputs()[0].offset, bytes);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--serve") == 0) {
    BenchService service;
    serve(rm::Fd(3), service);
    return 0;
  }
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 20000;
  Worker::Options options;
  options.process = {{"/proc/self/exe", "--serve"}, {"PATH=/usr/bin:/bin"}, 0};
  const auto worker = Worker::start(options, {});
  const size_t small = 4096, large = size_t{64} << 20;
  const auto program = load(*worker, static_cast<int64_t>(small));
  std::vector<char> in(large, 1), out(large, 2), copy(large, 3);
  sample(rounds / 10, [&] { call(*program, in.data(), out.data(), small); });
  // Interleaved: what else runs on the machine meets both alike.
  std::vector<double> bare, round_trip;
  for (int block = 0; block < 10; ++block) {
    for (const double t : ping_pong(rounds / 10)) bare.push_back(t);
    for (const double t :
         sample(rounds / 10, [&] { call(*program, in.data(), out.data(), small); })) {
      round_trip.push_back(t);
    }
  }
  std::sort(bare.begin(), bare.end());
  std::sort(round_trip.begin(), round_trip.end());
  const auto big = load(*worker, static_cast<int64_t>(large));
  call(*big, in.data(), out.data(), large);  // pages are there now
  std::vector<double> through, probe;
  for (int i = 0; i < 9; ++i) {
    for (const double t : sample(1, [&] {
           std::memcpy(copy.data(), in.data(), large);
           std::memcpy(out.data(), copy.data(), large);
         })) {
      probe.push_back(t);
    }
    for (const double t : sample(1, [&] { call(*big, in.data(), out.data(), large); })) {
      through.push_back(t);
    }
  }
  std::sort(probe.begin(), probe.end());
  std::sort(through.begin(), through.end());
  std::printf("{\n");
  print("eventfd_ping_pong_us", bare);
  print("worker_round_trip_4k_us", round_trip);
  print("two_copies_64M_us", probe);
  print("worker_call_64M_us", through);
  std::printf("  \"round_trip_over_ping_pong_p50\": %.2f,\n", at(round_trip, 0.5) / at(bare, 0.5));
  std::printf("  \"large_share_of_copy_probe_p50\": %.2f\n}\n", at(probe, 0.5) / at(through, 0.5));
  return 0;
}
