// One worker and several threads of its user: no data race (run under the thread sanitizer), no
// wait beyond the caller's own limits, and no run while states are made or copied.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <concepts>
#include <thread>

#include "start_worker.hpp"

using namespace rm;
using namespace rm::worker;
using namespace rm::test;

namespace {

const TensorSlot kState{"kept", {kDLFloat, 32, 1}, {2}, 0, 0, ""};

/// A thread that is joined whatever the test throws.
struct Thread {
  std::thread thread;
  template <std::invocable Body>
  explicit Thread(Body&& body) : thread(std::forward<Body>(body)) {}
  Thread(Thread&&) = default;
  ~Thread() { join(); }
  void join() {
    if (thread.joinable()) thread.join();
  }
};

void sleep_ms(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

/// Compiles for `seconds` in a thread and returns once the worker has begun.
Thread compile_for(Worker& worker, const char* program, std::atomic<bool>& succeeded) {
  auto begun = std::make_shared<std::atomic<bool>>(false);
  Thread compiling([&worker, program, &succeeded, begun] {
    const auto note = [&](double, const std::string&) { *begun = true; };
    succeeded = worker.compile({0, program, {}, {}}, nullptr, note, {60, {}}) == program;
  });
  while (!*begun) sleep_ms(1);
  return compiling;
}

}  // namespace

TEST_CASE("a worker compiles for one thread while it executes for another") {
  const auto worker = start();
  const auto program = load(*worker, "copy");
  std::atomic<bool> compiled{false}, ended{false};
  Thread compiling([&] {
    for (int i = 0; i < 5; ++i) {
      compiled = worker->compile({0, "slow 0.05", {}, {}}, nullptr, {}, {60, {}}) == "slow 0.05";
    }
    ended = true;
  });
  while (!ended) program->execute({60, {}});
  compiling.join();
  CHECK(compiled);
}

TEST_CASE("as many programs run at once as the worker takes") {
  const auto worker = start("2");
  const auto one = load(*worker, "meet"), two = load(*worker, "meet");
  Thread other([&] {
    for (int i = 0; i < 50; ++i) two->execute({60, {}});
  });
  for (int i = 0; i < 50; ++i) one->execute({60, {}});
  other.join();
  CHECK(worker->alive());
}

TEST_CASE("states are made while nothing runs, however many programs run at once") {
  for (const char* executions : {"0", "3", "100"}) {  // beyond the limits: the nearest
    const auto worker = start(executions);
    std::atomic<int> wrong{0};
    std::vector<Thread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&worker, &wrong, i] {
        const auto program = load(*worker, "copy");
        auto* in = reinterpret_cast<float*>(program->memory().data());
        const auto* out = reinterpret_cast<const float*>(program->memory().data() +
                                                         program->outputs().at(0).offset);
        for (int run = 0; run < 100; ++run) {
          in[0] = static_cast<float>(100 * i + run);
          program->execute({60, {}});
          if (out[0] != in[0]) ++wrong;
        }
      });
    }
    for (int i = 0; i < 50; ++i) CHECK(worker->make_states(0, {kState}, {60, {}})->alive());
    threads.clear();
    CHECK(wrong == 0);
  }
}

TEST_CASE("a run that is late ends the process, and what runs beside it is told") {
  const auto worker = start("2");
  const auto late = load(*worker, "hang"), beside = load(*worker, "hang");
  Thread other([&] { CHECK(failure_of([&] { beside->execute({60, {}}); }).reason() == "RM303"); });
  CHECK(failure_of([&] { late->execute({0.3, {}}); }).reason() == "RM308");
  other.join();
}

TEST_CASE("a process is watched by one thread and killed by another") {
  for (int round = 0; round < 20; ++round) {
    auto [left, right] = Channel::make_pair();
    ChildProcess child({{"/bin/sleep", "60"}, {"PATH=/usr/bin:/bin"}, 0}, right);
    Thread watcher([&] {
      while (child.alive()) std::this_thread::yield();
      CHECK(child.ending().starts_with("signal 9"));
    });
    child.kill();
    CHECK(child.ending().starts_with("signal 9"));
  }
}

TEST_CASE("a request that waits for another thread's request keeps its own time limit") {
  const auto worker = start();
  std::atomic<bool> compiled{false};
  Thread compiling = compile_for(*worker, "slow 2", compiled);
  const auto begin = Clock::now();
  const TensorSlot slot{"", {kDLFloat, 32, 1}, {4}, 0, 0, ""};
  const auto load_impatiently = [&] {
    worker->load({0, "copy", {}, {slot}, {slot}, {}}, nullptr, {0.2, {}});
  };
  CHECK(failure_of(load_impatiently).code() == RM_DEADLINE_EXCEEDED);
  CHECK(seconds_since(begin) < 1.5);
  compiling.join();
  CHECK(compiled);  // the other thread's request was not harmed
  CHECK(worker->alive());
}

TEST_CASE("a call that waits for another thread's run can be interrupted and timed out") {
  const auto worker = start();
  const auto nap = load(*worker, "nap");
  const auto copy = load(*worker, "copy");
  Thread running([&] { nap->execute({60, {}}); });
  sleep_ms(100);
  const auto begin = Clock::now();
  struct Stop {};
  CHECK_THROWS_AS(copy->execute({60, [] { throw Stop(); }}), Stop);
  CHECK(failure_of([&] { copy->execute({0.2, {}}); }).code() == RM_DEADLINE_EXCEEDED);
  CHECK(seconds_since(begin) < 1);
  running.join();
  CHECK(worker->alive());
  copy->execute({60, {}});
}

TEST_CASE("copying states waits for a compilation without stopping executions") {
  const auto worker = start();
  const auto program = load(*worker, "copy");
  const auto one = worker->make_states(0, {kState}, {60, {}});
  const auto two = worker->make_states(0, {kState}, {60, {}});
  std::atomic<bool> compiled{false};
  Thread compiling = compile_for(*worker, "slow 2", compiled);
  Thread copying([&] { one->copy_from(*two, {0, 0, 0, UINT64_MAX, {}}, {60, {}}); });
  sleep_ms(100);
  const auto begin = Clock::now();
  for (int i = 0; i < 10; ++i) program->execute({60, {}});
  CHECK(seconds_since(begin) < 1);
}

TEST_CASE("states are neither made nor copied while a program runs") {
  const auto worker = start();
  const auto nap = load(*worker, "nap");  // the test's service refuses both while it sleeps
  const auto states = worker->make_states(0, {kState}, {60, {}});
  Thread running([&] { nap->execute({60, {}}); });
  sleep_ms(100);
  const auto more = worker->make_states(0, {kState}, {60, {}});
  running.join();
  Thread again([&] { nap->execute({60, {}}); });
  sleep_ms(100);
  more->copy_from(*states, {0, 0, 0, UINT64_MAX, {}}, {60, {}});
}

TEST_CASE("objects of a stopped worker are let go without waiting for it") {
  const auto worker = start();
  std::vector<std::shared_ptr<StateSet>> states;
  for (int i = 0; i < 500; ++i) states.push_back(worker->make_states(0, {kState}, {60, {}}));
  kill(worker->pid(), SIGSTOP);
  while (state_of(worker->pid()) != 'T') sleep_ms(1);
  const auto begin = Clock::now();
  Thread waker([&] {  // so that a sender which blocks fails the test instead of stopping it
    sleep_ms(3000);
    kill(worker->pid(), SIGCONT);
  });
  states.clear();  // more messages than the socket's queue takes
  CHECK(seconds_since(begin) < 2);
  waker.join();
  CHECK(worker->compile({0, "next", {}, {}}, nullptr, {}, {60, {}}) == "next");
  CHECK(worker->make_states(0, {kState}, {60, {}})->alive());
  // All were freed in the end: the service refuses to hold more than 700 sets.
  for (int i = 0; i < 500; ++i) states.push_back(worker->make_states(0, {kState}, {60, {}}));
}

TEST_CASE("a request to a stopped worker with a full queue keeps its time limit") {
  const auto worker = start();
  std::vector<std::shared_ptr<StateSet>> states;
  for (int i = 0; i < 500; ++i) states.push_back(worker->make_states(0, {kState}, {60, {}}));
  kill(worker->pid(), SIGSTOP);
  while (state_of(worker->pid()) != 'T') sleep_ms(1);
  states.clear();
  const auto begin = Clock::now();
  const auto compile = [&] { worker->compile({0, "x", {}, {}}, nullptr, {}, {0.3, {}}); };
  CHECK(failure_of(compile).reason() == "RM302");
  CHECK(seconds_since(begin) < 5);
}

TEST_CASE("killing a process that cannot be reaped yet ends in bounded time") {
  auto [left, right] = Channel::make_pair();
  auto child = std::make_unique<ChildProcess>(
      ChildProcess::Options{{"/proc/self/exe", "--traceable"}, {"PATH=/usr/bin:/bin"}, 0}, right);
  const pid_t pid = child->pid();
  for (int i = 0; i < 2000 && child->log_tail().empty(); ++i) sleep_ms(5);
  // A tracer keeps a killed process from being reaped, as a driver in an uninterruptible call does.
  int ready[2];
  REQUIRE(pipe(ready) == 0);
  const pid_t tracer = fork();
  if (tracer == 0) {
    const char answer = ptrace(PTRACE_SEIZE, pid, nullptr, nullptr) == 0 ? 'y' : 'n';
    if (write(ready[1], &answer, 1) != 1) _exit(1);
    pause();
  }
  char answer = 0;
  REQUIRE(read(ready[0], &answer, 1) == 1);
  if (answer == 'y') {
    const auto begin = Clock::now();
    std::atomic<bool> ended{false};
    Thread helper([&] {  // so that a kill which blocks fails the test instead of stopping it
      for (int i = 0; i < 600 && !ended; ++i) sleep_ms(10);
      kill(tracer, SIGKILL);
    });
    child->kill();
    ended = true;
    CHECK(seconds_since(begin) < 4);
    CHECK(child->ending().find("could not be ended") != std::string::npos);
  } else {
    MESSAGE("not checked: ptrace is not permitted here");
    kill(tracer, SIGKILL);
  }
  waitpid(tracer, nullptr, 0);
  child.reset();
  // What could not be reaped then is reaped by the next child's start.
  auto [next_left, next_right] = Channel::make_pair();
  ChildProcess next({{"/bin/true"}, {"PATH=/usr/bin:/bin"}, 0}, next_right);
  CHECK(state_of(pid) == 0);
}
