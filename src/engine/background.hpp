// Work on a thread of the engine's own, which exists only while there is some.
//
// Nobody but stop_all() waits for a job, so a job must own everything it reads. The process may exit
// or fork at any time: both wait until the running job reaches a checkpoint, so a job calls
// checkpoint() every few milliseconds, and between two of them it never waits for a lock that a
// thread may hold while it exits or forks (Python's, for one).
#pragma once

#include <atomic>
#include <functional>
#include <memory>

namespace rm::engine {

/// What a running job sees of its Background.
class JobControl {
 public:
  explicit JobControl(const std::atomic<bool>& cancelled) : cancelled_(cancelled) {}
  bool cancelled() const { return cancelled_.load(std::memory_order_relaxed); }
  /// Lets a waiting fork go first; throws rm::Error(RM_CANCELLED) when the job is to end. The job
  /// holds no lock here.
  void checkpoint() const;
  /// Runs `work` while the process may fork. It holds no lock, and writes only memory that nobody
  /// else can see.
  void run_unguarded(const std::function<void()>& work) const;

 private:
  const std::atomic<bool>& cancelled_;
};

class Background {
 public:
  using Job = std::function<void(const JobControl&)>;

  Background();
  ~Background();  // as cancel()
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  /// Queues a job. Dropped in a child process of the one that made this object, and after stop_all.
  void post(Job job);
  /// Drops queued jobs and asks the running one to stop, without waiting for it.
  void cancel();
  /// Waits until every queued job has run.
  void wait();
  /// cancel() for every object of the process, and waits until no job runs. Later jobs are dropped.
  static void stop_all();

 private:
  struct State;
  struct Live;
  static Live& live();
  static void work(const std::shared_ptr<State>& state);
  std::shared_ptr<State> state_;
};

}  // namespace rm::engine
