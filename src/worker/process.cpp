// posix_spawn: safe from any thread of a large multithreaded process, and quick (vfork inside).
#include "worker/process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

namespace rm::worker {
namespace {

constexpr off_t kMaxLogBytes = off_t{4} << 20;
constexpr size_t kKeptLogBytes = size_t{64} << 10;
constexpr int kInheritedAs = 3;

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

constexpr int kCollectedByOthers = -1;
constexpr std::chrono::milliseconds kEndsAfterKill{2000};
constexpr int kStacksSignal = SIGUSR1;  // rm_abstract/worker/__main__.py listens
constexpr std::chrono::milliseconds kStacksAreWritten{2000};

/// Killed children that could not be reaped at once.
class Unreaped {
 public:
  void add(pid_t pid) {
    const std::lock_guard lock(mutex_);
    pids_.push_back(pid);
  }
  void reap() {
    const std::lock_guard lock(mutex_);
    if (owner_ != getpid()) pids_.clear();  // a forked child has none of its parent's children
    owner_ = getpid();
    std::erase_if(pids_, [](pid_t pid) { return waitpid(pid, nullptr, WNOHANG) != 0; });
  }

 private:
  std::mutex mutex_;
  std::vector<pid_t> pids_;
  pid_t owner_ = getpid();
};

Unreaped& unreaped() {
  static Unreaped all;
  return all;
}

/// The file actions and attributes of one spawn, freed whatever happens.
struct SpawnPlan {
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;
  SpawnPlan() {
    posix_spawn_file_actions_init(&actions);
    posix_spawnattr_init(&attributes);
  }
  ~SpawnPlan() {
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
  }
  SpawnPlan(const SpawnPlan&) = delete;
  SpawnPlan& operator=(const SpawnPlan&) = delete;

  void fill(const Fd& log, const Fd& inherited) {
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_adddup2(&actions, log.get(), 1);
    posix_spawn_file_actions_adddup2(&actions, log.get(), 2);
    posix_spawn_file_actions_adddup2(&actions, inherited.get(), kInheritedAs);
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 34)
    posix_spawn_file_actions_addclosefrom_np(&actions, kInheritedAs + 1);
#endif
    // A session of its own: the terminal's Ctrl-C is the user's process' business.
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    sigdelset(&all, SIGKILL);
    sigdelset(&all, SIGSTOP);
    posix_spawnattr_setsigmask(&attributes, &none);
    posix_spawnattr_setsigdefault(&attributes, &all);
    posix_spawnattr_setflags(&attributes,
                             POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  }
};

Fd make_log(const std::string& path) {
  if (!path.empty()) {
    Fd file(open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    if (!file) throw FileError("open", path, errno);
    return file;
  }
  Fd log(memfd_create("rm_abstract_log", MFD_CLOEXEC));
  if (!log) throw FileError("memfd_create", "the worker's log", errno);
  fcntl(log.get(), F_SETFL, O_APPEND);
  return log;
}

/// dup2 onto the descriptor it already is would leave close-on-exec set.
Fd away_from(const Fd& file, int taken) {
  return Fd(fcntl(file.get(), F_DUPFD_CLOEXEC, taken + 1));
}

}  // namespace

ChildProcess::ChildProcess(const Options& options, const Fd& inherited)
    : owner_(getpid()), log_(make_log(options.log_path)), log_path_(options.log_path) {
  unreaped().reap();
  const Fd end = away_from(inherited, kInheritedAs);
  const Fd log = away_from(log_, kInheritedAs);
  SpawnPlan plan;
  plan.fill(log, end);
  const auto command = pointers(options.command);
  const auto environment = pointers(options.environment);
  const int error = posix_spawnp(&pid_, command[0], &plan.actions, &plan.attributes, command.data(),
                                 environment.data());
  if (error != 0) {
    pid_ = -1;
    throw Error(RM_UNAVAILABLE,
                "[worker] expected to start " + options.command.front() + ", got " +
                    std::strerror(error) + "; check the interpreter it names",
                "RM401");
  }
#ifdef SYS_pidfd_open
  pidfd_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, pid_, 0)));
#endif
  const rlimit no_core{0, 0};
  prlimit(pid_, RLIMIT_CORE, &no_core, nullptr);
  if (options.memory_limit_bytes > 0) {
    const rlimit memory{options.memory_limit_bytes, options.memory_limit_bytes};
    prlimit(pid_, RLIMIT_AS, &memory, nullptr);
  }
}

ChildProcess::~ChildProcess() { kill(); }

bool ChildProcess::has_ended_locked() noexcept {
  if (state_ != State::kRunning) return true;
  if (pid_ < 0 || getpid() != owner_) return false;
  int status = 0;
  pid_t got = -1;
  do {
    got = waitpid(pid_, &status, WNOHANG);
  } while (got < 0 && errno == EINTR);
  if (got == 0) return false;
  state_ = State::kReaped;
  status_ = got == pid_ ? status : kCollectedByOthers;  // ECHILD: the user's process reaps all
  return true;
}

bool ChildProcess::alive() {
  const std::lock_guard lock(mutex_);
  return !has_ended_locked();
}

std::string ChildProcess::ending() {
  const std::lock_guard lock(mutex_);
  if (!has_ended_locked()) return {};
  if (state_ == State::kLeftToTheNext) return "a process that was killed but could not be ended";
  if (status_ == kCollectedByOthers) return "an end that somebody else collected";
  if (WIFSIGNALED(status_)) {
    const int signal = WTERMSIG(status_);
    return "signal " + std::to_string(signal) + " (" + strsignal(signal) + ")";
  }
  return "exit status " + std::to_string(WEXITSTATUS(status_));
}

bool ChildProcess::wait_for(std::chrono::milliseconds limit) {
  const auto until = std::chrono::steady_clock::now() + limit;
  while (alive()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        until - std::chrono::steady_clock::now());
    if (left.count() <= 0) return false;
    // In slices also with a pidfd: it is readable before a traced process can be reaped.
    pollfd ended{pidfd_.get(), POLLIN, 0};
    if (!pidfd_ || poll(&ended, 1, static_cast<int>(left.count())) != 0) {
      std::this_thread::sleep_for(std::min(left, std::chrono::milliseconds(2)));
    }
  }
  return true;
}

void ChildProcess::kill() noexcept {
  if (pid_ < 0 || getpid() != owner_) return;
  {
    // The whole session: what the vendor's compiler started ends too.
    const std::lock_guard lock(mutex_);
    if (has_ended_locked()) return;
    ::kill(-pid_, SIGKILL);
    ::kill(pid_, SIGKILL);
  }
  if (wait_for(kEndsAfterKill)) return;
  const std::lock_guard lock(mutex_);
  if (has_ended_locked()) return;
  state_ = State::kLeftToTheNext;
  unreaped().add(pid_);
}

std::string ChildProcess::log_tail(size_t bytes) {
  struct stat status {};
  if (fstat(log_.get(), &status) != 0) return {};
  const off_t start = std::max<off_t>(0, status.st_size - static_cast<off_t>(bytes));
  std::string out(static_cast<size_t>(status.st_size - start), '\0');
  const ssize_t got = pread(log_.get(), out.data(), out.size(), start);
  out.resize(got < 0 ? 0 : static_cast<size_t>(got));
  return out;
}

void ChildProcess::trim_log() noexcept {
  struct stat status {};
  if (!log_path_.empty() || fstat(log_.get(), &status) != 0 || status.st_size <= kMaxLogBytes) {
    return;
  }
  try {
    const std::string end = log_tail(kKeptLogBytes);
    if (ftruncate(log_.get(), 0) != 0) return;
    // O_APPEND: in front of what the process writes from now on, or behind a line of it.
    if (write(log_.get(), end.data(), end.size()) < 0) return;
  } catch (...) {
    // No memory for the end: it is trimmed the next time.
  }
}

uint64_t ChildProcess::log_bytes() const noexcept {
  struct stat status {};
  return fstat(log_.get(), &status) == 0 ? static_cast<uint64_t>(status.st_size) : 0;
}

void ChildProcess::ask_for_stacks() noexcept {
  const uint64_t before = log_bytes();
  {
    const std::lock_guard lock(mutex_);
    if (has_ended_locked() || ::kill(pid_, kStacksSignal) != 0) return;
  }
  const auto until = std::chrono::steady_clock::now() + kStacksAreWritten;
  while (log_bytes() == before && alive() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  wait_for(std::chrono::milliseconds(50));  // the rest of them
}

std::string ChildProcess::log_named() const {
  return log_path_.empty() ? std::string() : "; its log is " + log_path_;
}

}  // namespace rm::worker
