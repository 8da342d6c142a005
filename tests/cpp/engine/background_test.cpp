// Background: order, cancelling, and what a fork and a new process state leave.
#include "engine/background.hpp"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

using rm::engine::Background;

namespace {
void rest() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }
}  // namespace

TEST_CASE("jobs run in order, and one that throws does not stop the next") {
  std::vector<int> order;
  Background work;
  for (int i = 0; i < 5; ++i) {
    work.post([&order, i](const std::atomic<bool>&) {
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
  work.post([&](const std::atomic<bool>& cancelled) {
    started = true;
    while (!cancelled) rest();
  });
  work.post([&](const std::atomic<bool>&) { second = true; });
  while (!started) rest();
  work.cancel();
  CHECK_FALSE(second);
  work.post([&](const std::atomic<bool>&) { third = true; });
  work.wait();
  CHECK(third);
}

TEST_CASE("a child of fork starts between jobs and neither runs nor waits for them") {
  Background work;
  std::atomic<int> running{0};
  for (int i = 0; i < 50; ++i) {
    work.post([&](const std::atomic<bool>&) {
      ++running;
      rest();
      --running;
    });
  }
  for (int i = 0; i < 5; ++i) {
    pid_t child = fork();
    if (child == 0) {
      if (running != 0) _exit(1);
      work.post([](const std::atomic<bool>&) { _exit(2); });
      work.wait();
      work.cancel();
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(status == 0);
  }
  work.cancel();
}
