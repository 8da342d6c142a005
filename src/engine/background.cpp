// One gate for all threads: it is held while a job runs, and taken around fork(), so a child never
// starts with a lock held by a thread it does not have.
#include "engine/background.hpp"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <set>
#include <thread>

#include "base/log.hpp"

namespace rm::engine {

struct Background::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Job> jobs;
  bool working = false;  // a thread exists
  std::atomic<bool> cancelled{false};
  const pid_t pid = getpid();

  void stop() {
    if (getpid() != pid) return;  // the thread is the parent's
    std::unique_lock lock(mutex);
    jobs.clear();
    cancelled = true;
    changed.wait(lock, [&] { return !working; });
    cancelled = false;
  }
};

namespace {

constexpr int kNice = 10;  // the caller's own threads come first

std::mutex& gate() {
  static auto* mutex = new std::mutex;  // never destroyed: threads may outlive static objects
  return *mutex;
}

void guard_forks() {
  static const int registered =
      pthread_atfork([] { gate().lock(); }, [] { gate().unlock(); }, [] { gate().unlock(); });
  static_cast<void>(registered);
}

}  // namespace

// What is alive, so that the process can stop it all before it ends.
struct Live {
  std::mutex mutex;
  std::set<void*> states;
  bool stopped = false;
};
static Live& live() {
  static auto* instance = new Live;
  return *instance;
}

Background::Background() : state_(std::make_shared<State>()) {
  guard_forks();
  std::lock_guard lock(live().mutex);
  live().states.insert(state_.get());
}

Background::~Background() {
  {
    std::lock_guard lock(live().mutex);
    live().states.erase(state_.get());
  }
  state_->stop();
}

void Background::post(Job job) {
  if (getpid() != state_->pid) return;
  {
    std::lock_guard lock(live().mutex);
    if (live().stopped) return;
  }
  std::lock_guard lock(state_->mutex);
  state_->jobs.push_back(std::move(job));
  if (state_->working) return;
  std::thread(work, state_).detach();
  state_->working = true;
}

void Background::cancel() { state_->stop(); }

void Background::wait() {
  if (getpid() != state_->pid) return;
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return !state_->working; });
}

void Background::stop_all() {
  std::lock_guard lock(live().mutex);
  live().stopped = true;
  for (void* state : live().states) static_cast<State*>(state)->stop();
}

void Background::work(const std::shared_ptr<State>& state) {
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);
  while (true) {
    std::lock_guard running(gate());
    Job job;
    {
      std::lock_guard lock(state->mutex);
      if (state->jobs.empty() || state->cancelled) {
        state->jobs.clear();
        state->working = false;
        state->changed.notify_all();
        return;
      }
      job = std::move(state->jobs.front());
      state->jobs.pop_front();
    }
    try {
      job(state->cancelled);
    } catch (const std::exception& error) {
      // Nobody waits for this job: what it would have improved stays as it is.
      if (!state->cancelled) {
        log_debug(LogTopic::kPlan, [&] { return std::string("background: ") + error.what(); });
      }
    }
  }
}

}  // namespace rm::engine
