// Background: order, cancelling, and what a fork and a new process state leave.
#include "engine/background.hpp"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

using rm::engine::Background;
using rm::engine::JobControl;
using Clock = std::chrono::steady_clock;

namespace {
void rest() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }
}  // namespace

TEST_CASE("jobs run in order, and one that throws does not stop the next") {
  std::vector<int> order;
  Background work;
  for (int i = 0; i < 5; ++i) {
    work.post([&order, i](const JobControl&) {
      order.push_back(i);
      if (i == 1) throw std::runtime_error("expected");
    });
  }
  work.wait();
  CHECK(order == std::vector<int>{0, 1, 2, 3, 4});
}

TEST_CASE("cancel stops the running job, drops the queued ones, and later jobs run again") {
  std::atomic<bool> started{false}, second{false}, third{false};
  Background work;
  work.post([&](const JobControl& control) {
    started = true;
    while (!control.cancelled()) rest();
  });
  work.post([&](const JobControl&) { second = true; });
  while (!started) rest();
  work.cancel();
  work.wait();
  CHECK_FALSE(second);
  work.post([&](const JobControl&) { third = true; });
  work.wait();
  CHECK(third);
}

TEST_CASE("a child of fork starts between jobs and neither runs nor waits for them") {
  Background work;
  std::atomic<int> running{0};
  for (int i = 0; i < 50; ++i) {
    work.post([&](const JobControl&) {
      ++running;
      rest();
      --running;
    });
  }
  for (int i = 0; i < 5; ++i) {
    pid_t child = fork();
    if (child == 0) {
      if (running != 0) _exit(1);
      work.post([](const JobControl&) { _exit(2); });
      work.wait();
      work.cancel();
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
  }
  work.cancel();
  work.wait();  // a running job still writes to this frame
}

TEST_CASE("cancel and the end of the object do not wait for a job") {
  auto started = std::make_shared<std::atomic<bool>>(false);
  auto go_on = std::make_shared<std::atomic<bool>>(false);
  {
    Background work;
    work.post([started, go_on](const JobControl&) {
      *started = true;
      while (!*go_on) rest();
    });
    while (!*started) rest();
    work.cancel();
  }
  *go_on = true;  // only now: waiting above would have been for ever
}

TEST_CASE("a checkpoint ends a job that was cancelled") {
  Background work;
  std::atomic<bool> started{false}, ended{false}, passed{false};
  work.post([&](const JobControl& control) {
    struct AtEnd {
      std::atomic<bool>& flag;
      ~AtEnd() { flag = true; }
    } at_end{ended};
    started = true;
    while (true) {
      control.checkpoint();
      rest();
    }
    passed = true;
  });
  while (!started) rest();
  work.cancel();
  work.wait();
  CHECK(ended);
  CHECK_FALSE(passed);
}

namespace {

// Milliseconds until fork() has returned in the parent; the child ends at once.
double fork_time() {
  const auto start = Clock::now();
  pid_t child = fork();
  if (child == 0) _exit(0);
  const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  return ms;
}

}  // namespace

TEST_CASE("a fork goes ahead at a checkpoint and in the middle of unguarded work") {
  Background work;
  std::atomic<bool> stop{false}, unguarded{false};
  work.post([&](const JobControl& control) {
    while (!stop) {
      control.checkpoint();
      rest();
    }
  });
  for (int i = 0; i < 5; ++i) CHECK(fork_time() < 2000);
  stop = true;
  work.wait();
  stop = false;
  work.post([&](const JobControl& control) {
    control.run_unguarded([&] {
      unguarded = true;
      while (!stop) rest();
    });
  });
  while (!unguarded) rest();
  for (int i = 0; i < 5; ++i) CHECK(fork_time() < 2000);
  stop = true;
  work.wait();
}

TEST_CASE("what a job owns is destroyed while a fork may go ahead") {
  Background work;
  std::atomic<bool> destroying{false}, stop{false};
  auto owned = std::shared_ptr<int>(new int, [&](int* p) {
    destroying = true;
    while (!stop) rest();
    delete p;
  });
  work.post([owned = std::move(owned)](const JobControl&) {});
  while (!destroying) rest();
  CHECK(fork_time() < 2000);
  stop = true;
  work.wait();
}

TEST_CASE("after stop_all no job runs and none is accepted, whatever object it is given to") {
  pid_t child = fork();  // it is for ever, so in a process of its own
  if (child == 0) {
    Background before;
    auto state = std::make_shared<std::atomic<int>>(0);
    {
      Background gone;  // its job outlives it
      gone.post([state](const JobControl& control) {
        *state = 1;
        while (!control.cancelled()) rest();
        *state = 2;
      });
      while (*state == 0) rest();
    }
    Background::stop_all();
    if (*state != 2) _exit(1);
    Background after;
    before.post([](const JobControl&) { _exit(2); });
    after.post([](const JobControl&) { _exit(3); });
    rest();
    before.wait();
    after.wait();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}
