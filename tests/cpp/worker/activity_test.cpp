// Whether a worker still does something: judged on made-up observations, and on real processes.
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "start_worker.hpp"
#include "worker/activity.hpp"

using namespace rm::worker;
using namespace rm::test;

namespace {

/// A judge with a limit of 100 s that is shown the same process every 10 s, changed by `step`.
template <class Step>
bool stalls_within(int seconds, Step&& step) {
  const WaitClock::time_point start{};
  StallJudge judge(100, start);
  Activity seen{5, 1 << 20, 100, 2};
  for (int at = 10; at <= seconds; at += 10) {
    step(seen, at);
    judge.saw(seen, start + std::chrono::seconds(at));
    if (judge.has_stalled(start + std::chrono::seconds(at))) return true;
  }
  return false;
}

}  // namespace

TEST_CASE("a process that only waits has stalled, one that does anything has not") {
  CHECK(stalls_within(150, [](Activity&, int) {}));
  CHECK_FALSE(stalls_within(90, [](Activity&, int) {}));
  // What idling costs is no progress: a twentieth of a percent of a core, a few bytes.
  CHECK(stalls_within(200, [](Activity& seen, int) { seen.cpu_s += 0.005, seen.io_bytes += 200; }));
  CHECK_FALSE(stalls_within(1000, [](Activity& seen, int) { seen.cpu_s += 0.2; }));
  CHECK_FALSE(stalls_within(1000, [](Activity& seen, int at) {
    if (at % 90 == 0) seen.io_bytes += 1 << 20;
  }));
  CHECK_FALSE(stalls_within(1000, [](Activity& seen, int at) {
    if (at % 90 == 0) seen.page_faults += 100;
  }));
  // A child that starts or ends is progress; the times it takes along are no regress.
  CHECK_FALSE(stalls_within(1000, [](Activity& seen, int at) {
    if (at % 90 == 0) seen.processes ^= 1, seen.cpu_s -= 0.5;
  }));
}

TEST_CASE("what was heard of a process counts as progress") {
  const WaitClock::time_point start{};
  StallJudge judge(100, start);
  judge.heard(start + std::chrono::seconds(90));
  CHECK_FALSE(judge.has_stalled(start + std::chrono::seconds(180)));
  CHECK(judge.has_stalled(start + std::chrono::seconds(191)));
}

TEST_CASE("the activity of a session is that of all its processes") {
  const pid_t leader = fork();
  if (leader == 0) {
    setsid();
    if (fork() == 0) {
      volatile unsigned long spins = 0;
      while (true) spins = spins + 1;
    }
    while (true) pause();
  }
  const auto begin = Clock::now();
  Activity seen;
  while (seen.cpu_s < 0.2 && seconds_since(begin) < 120) {
    if (const auto found = activity_of(leader)) seen = *found;
    usleep(10'000);
  }
  CHECK(seen.processes == 2);
  CHECK(seen.cpu_s >= 0.2);
  kill(-leader, SIGKILL);
  int status = 0;
  waitpid(leader, &status, 0);
  const auto killed = Clock::now();
  while (activity_of(leader) && seconds_since(killed) < 120) usleep(10'000);
  CHECK_FALSE(activity_of(leader));
}

TEST_CASE("a compilation that waits for ever is noticed without a deadline") {
  const auto worker = start();
  const rm::Error error = failure_of([&] {
    worker->compile({0, "stuck", {}, {}}, nullptr, {}, {0, {}, 4});
  });
  CHECK(error.reason() == "RM309");
  CHECK(std::string(error.what()).find("4 s in which it neither computed") != std::string::npos);
  CHECK(std::string(error.what()).find("about to wait") != std::string::npos);  // its log
  CHECK_FALSE(worker->alive());
}

TEST_CASE("a program that never finishes loading is noticed without a deadline") {
  const auto worker = start();
  TensorSlot slot{"", {kDLFloat, 32, 1}, {4}, 0, 0, ""};
  const rm::Error error = failure_of([&] {
    worker->load({0, "stuck", {}, {slot}, {slot}, {}}, nullptr, {0, {}, 4});
  });
  CHECK(error.reason() == "RM309");
  CHECK_FALSE(worker->alive());
}
