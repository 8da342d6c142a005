// /proc/*/stat of every process whose session it is, and /proc/*/io where this user may read it.
#include "worker/activity.hpp"

#include <dirent.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

namespace rm::worker {
namespace {

// What a process that only waits does all the same: a thread that beats, a logger that looks.
constexpr double kIdleShare = 0.01;
constexpr double kIdleCpuS = 0.1;
constexpr uint64_t kIdleBytes = 64 << 10;
constexpr uint64_t kIdleFaults = 16;
constexpr std::chrono::duration<double> kMostBetweenLooks{10};

std::string text_of(const std::string& path) {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "r"), &std::fclose);
  if (file == nullptr) return {};
  char bytes[1024];
  return std::string(bytes, std::fread(bytes, 1, sizeof bytes, file.get()));
}

/// Adds a process of the session; its children that ended are counted in its own times.
void add_process(const char* pid, pid_t session, double ticks_a_second, Activity& sum) {
  const std::string folder = std::string("/proc/") + pid;
  const std::string stat = text_of(folder + "/stat");
  const size_t name_end = stat.rfind(')');
  if (name_end == std::string::npos) return;  // it has ended meanwhile
  char state = 0;
  int its_session = 0;
  unsigned long faults = 0, user = 0, system = 0;
  long ended_user = 0, ended_system = 0;
  const int got = std::sscanf(stat.c_str() + name_end + 1,
                              " %c %*d %*d %d %*d %*d %*u %*u %*u %lu %*u %lu %lu %ld %ld",
                              &state, &its_session, &faults, &user, &system, &ended_user, &ended_system);
  if (got != 7 || its_session != session || state == 'Z') return;
  sum.processes += 1;
  sum.page_faults += faults;
  const auto ended = static_cast<double>(ended_user) + static_cast<double>(ended_system);
  sum.cpu_s += (static_cast<double>(user) + static_cast<double>(system) + ended) / ticks_a_second;
  const std::string io = text_of(folder + "/io");
  for (const char* field : {"rchar: ", "wchar: "}) {
    const char* at = std::strstr(io.c_str(), field);
    if (at != nullptr) sum.io_bytes += std::strtoull(at + std::strlen(field), nullptr, 10);
  }
}

}  // namespace

std::optional<Activity> activity_of(pid_t session) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir("/proc"), &closedir);
  if (folder == nullptr) return std::nullopt;
  const double ticks_a_second = std::max(1.0, static_cast<double>(sysconf(_SC_CLK_TCK)));
  Activity sum;
  while (const dirent* entry = readdir(folder.get())) {
    if (std::isdigit(static_cast<unsigned char>(entry->d_name[0])) == 0) continue;
    add_process(entry->d_name, session, ticks_a_second, sum);
  }
  if (sum.processes == 0) return std::nullopt;
  return sum;
}

void StallJudge::saw(const Activity& activity, WaitClock::time_point now) {
  if (!has_mark_) {
    mark_ = activity;
    has_mark_ = true;
    return;
  }
  const double waited_s = std::chrono::duration<double>(now - moved_at_).count();
  const bool changed = activity.processes != mark_.processes;
  // A process that ended took its counts along: less than before says nothing, the change does.
  const auto more = [](uint64_t is, uint64_t was) { return is > was ? is - was : 0; };
  const double used_s = activity.cpu_s - mark_.cpu_s;
  if (changed || used_s > std::max(kIdleCpuS, kIdleShare * waited_s) ||
      more(activity.io_bytes, mark_.io_bytes) > kIdleBytes ||
      more(activity.page_faults, mark_.page_faults) > kIdleFaults) {
    mark_ = activity;
    moved_at_ = now;
  }
}

StallWatch::StallWatch(pid_t session, double limit_s)
    : session_(session),
      limit_s_(limit_s),
      judge_(limit_s, WaitClock::now()),
      next_look_(WaitClock::now()) {}

bool StallWatch::has_stalled(uint64_t log_bytes) {
  if (limit_s_ <= 0) return false;
  const auto now = WaitClock::now();
  if (log_bytes != log_bytes_) {
    log_bytes_ = log_bytes;
    judge_.heard(now);
  }
  if (now < next_look_) return false;
  const auto between = std::min(kMostBetweenLooks, std::chrono::duration<double>(limit_s_ / 20));
  next_look_ = now + std::chrono::duration_cast<WaitClock::duration>(between);
  const auto activity = activity_of(session_);
  if (!activity) {  // nothing to judge by: the caller's deadline is what is left
    judge_.heard(now);
    return false;
  }
  judge_.saw(*activity, now);
  return judge_.has_stalled(now);
}

}  // namespace rm::worker
