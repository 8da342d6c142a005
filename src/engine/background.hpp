// Work behind the caller's back, on one thread that exists only while there is some.
//
// Jobs never run while the process forks and are told to stop when it exits. A job must look at
// its flag every few milliseconds; what it throws after that is dropped.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

namespace rm::engine {

class Background {
 public:
  using Job = std::function<void(const std::atomic<bool>& cancelled)>;

  Background();
  ~Background();  // as cancel()
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// Queues a job. In a child process of the one that made this object, jobs are dropped.
  void post(Job job);
  /// Drops queued jobs, tells the running one to stop and waits until it has.
  void cancel();
  /// Waits until every queued job has run.
  void wait();
  /// cancel() for every object of the process; later jobs are dropped.
  static void stop_all();

 private:
  struct State;
  static void work(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;
};

}  // namespace rm::engine
