// One gate for the jobs of the process: a job is inside it except while it runs unguarded, and a
// fork closes it. So a child never starts with a lock that a thread it does not have was holding.
#include "engine/background.hpp"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"

namespace rm::engine {
namespace {

constexpr int kNice = 10;  // the caller's own threads come first

class Gate {
 public:
  void enter() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !occupied_ && forks_waiting_ == 0; });
    occupied_ = true;
  }
  void leave() {
    {
      std::lock_guard lock(mutex_);
      occupied_ = false;
    }
    changed_.notify_all();
  }
  bool wanted() const { return forks_waiting_.load(std::memory_order_relaxed) != 0; }

  // Around fork(): the mutex stays locked until the parent goes on.
  void close() {
    ++forks_waiting_;
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !occupied_; });
    lock.release();
  }
  void reopen() {
    --forks_waiting_;
    mutex_.unlock();
    changed_.notify_all();
  }
  /// The thread that forked holds the mutex, and no other one exists: nobody waits or works.
  void reopen_in_child() {
    new (&changed_) std::condition_variable;
    occupied_ = false;
    forks_waiting_ = 0;
    mutex_.unlock();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool occupied_ = false;
  std::atomic<int> forks_waiting_{0};
};

Gate& gate() {
  static auto* instance = new Gate;  // never destroyed: threads may outlive static objects
  return *instance;
}

void guard_forks() {
  static const int registered = pthread_atfork(
      [] { gate().close(); }, [] { gate().reopen(); },
      [] { gate().reopen_in_child(); });
  static_cast<void>(registered);
}

class InGate {
 public:
  InGate() { gate().enter(); }
  ~InGate() { gate().leave(); }
  InGate(const InGate&) = delete;
  InGate& operator=(const InGate&) = delete;
};

class OutOfGate {
 public:
  OutOfGate() { gate().leave(); }
  ~OutOfGate() { gate().enter(); }
  OutOfGate(const OutOfGate&) = delete;
  OutOfGate& operator=(const OutOfGate&) = delete;
};

}  // namespace

void JobControl::checkpoint() const {
  if (gate().wanted()) OutOfGate fork_goes_first;
  if (cancelled()) throw Error(RM_CANCELLED, "[background] expected to go on, got a request to stop");
}

void JobControl::run_unguarded(const std::function<void()>& work) const {
  OutOfGate guard;
  work();
}

struct Background::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> jobs;
  std::shared_ptr<std::atomic<bool>> running;  // the flag of the running job
  bool working = false;                        // a thread exists
  bool closed = false;                         // no job is accepted any more
  const pid_t pid = getpid();

  std::deque<Job> cancel(bool close = false) {
    std::deque<Job> dropped;  // its jobs own things: they go when no lock is held
    if (getpid() != pid) return dropped;  // the thread is the parent's
    std::lock_guard lock(mutex);
    closed = closed || close;
    dropped.swap(jobs);
    if (running != nullptr) *running = true;
    return dropped;
  }
  void wait() {
    if (getpid() != pid) return;
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return !working; });
  }
};

// What is alive, so that the process can stop it all before it ends. A thread keeps its state alive.
struct Background::Live {
  std::mutex mutex;
  std::vector<std::weak_ptr<State>> states;
  bool stopped = false;
};

Background::Live& Background::live() {
  static auto* instance = new Live;
  return *instance;
}

Background::Background() : state_(std::make_shared<State>()) {
  guard_forks();
  std::lock_guard lock(live().mutex);
  state_->closed = live().stopped;
  std::erase_if(live().states, [](const auto& state) { return state.expired(); });
  live().states.push_back(state_);
}

Background::~Background() { cancel(); }

void Background::post(Job job) {
  if (getpid() != state_->pid) return;
  std::lock_guard lock(state_->mutex);
  if (state_->closed) return;
  state_->jobs.push_back(std::move(job));
  if (state_->working) return;
  std::thread(work, state_).detach();
  state_->working = true;
}

void Background::cancel() { state_->cancel(); }

void Background::wait() { state_->wait(); }

void Background::stop_all() {
  std::vector<std::shared_ptr<State>> states;
  {
    std::lock_guard lock(live().mutex);
    live().stopped = true;
    for (const auto& state : live().states) states.push_back(state.lock());
  }
  std::erase(states, nullptr);
  for (const auto& state : states) state->cancel(true);
  for (const auto& state : states) state->wait();
}

namespace {

void run(const Background::Job& job, const std::atomic<bool>& cancelled) {
  try {
    InGate guard;
    job(JobControl(cancelled));
  } catch (const std::exception& error) {
    // Nobody waits for this job: what it would have improved stays as it is.
    if (cancelled) return;
    log_debug(LogTopic::kPlan, [&] { return std::string("background: ") + error.what(); });
  }
}

}  // namespace

void Background::work(const std::shared_ptr<State>& state) {
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);
  while (true) {
    auto cancelled = std::make_shared<std::atomic<bool>>(false);
    Job job;
    {
      std::lock_guard lock(state->mutex);
      state->running = nullptr;
      if (state->jobs.empty()) {
        state->working = false;
        state->changed.notify_all();
        return;
      }
      state->running = cancelled;
      job = std::move(state->jobs.front());
      state->jobs.pop_front();
    }
    run(job, *cancelled);
    // What the job owns goes here, outside the gate: weights of another library may need its locks.
    job = nullptr;
  }
}

}  // namespace rm::engine
