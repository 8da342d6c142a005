// Topic levels are the parsed form of the option `log`. A line is written by one call, so lines of
// several threads and processes do not mix.
#include "base/log.hpp"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>

#include "base/error.hpp"

namespace rm {
namespace {

constexpr size_t kTopicCount = static_cast<size_t>(LogTopic::kCount);
constexpr std::array<std::string_view, kTopicCount> kTopics = {
    "backend", "cache", "capture", "config", "ir", "passes", "plan", "route", "runtime", "select"};
constexpr std::array<std::string_view, 6> kLevels = {"trace", "debug", "info",
                                                     "warn",  "error", "off"};

using Levels = std::array<LogLevel, kTopicCount>;

template <size_t N>
size_t index_of(const std::array<std::string_view, N>& names, std::string_view name) {
  size_t i = 0;
  while (i < N && names[i] != name) ++i;
  return i;
}

template <size_t N>
std::string joined(const std::array<std::string_view, N>& names) {
  std::string out;
  for (std::string_view name : names) out += (out.empty() ? "" : ", ") + std::string(name);
  return out;
}

void apply_item(std::string_view item, Levels& levels) {
  const size_t equals = item.find('=');
  const std::string_view topic = item.substr(0, equals);
  const size_t topic_index = index_of(kTopics, topic);
  size_t level = static_cast<size_t>(LogLevel::kDebug);
  if (equals != std::string_view::npos) {
    level = index_of(kLevels, item.substr(equals + 1));
  } else if (const size_t bare = index_of(kLevels, topic); bare < kLevels.size()) {
    levels.fill(static_cast<LogLevel>(bare));
    return;
  }
  const bool every = topic == "all";
  if (level == kLevels.size() || (topic_index == kTopicCount && !every)) {
    throw_invalid("[log] expected topic, topic=level or level with topics " + joined(kTopics) +
                  " and levels " + joined(kLevels) + ", got '" + std::string(item) +
                  "'; try RM_LOG=cache=debug,plan");
  }
  if (every) {
    levels.fill(static_cast<LogLevel>(level));
  } else {
    levels[topic_index] = static_cast<LogLevel>(level);
  }
}

Levels parse_levels(std::string_view spec) {
  Levels levels;
  levels.fill(LogLevel::kWarn);
  while (!spec.empty()) {
    const size_t comma = spec.find(',');
    std::string_view item = spec.substr(0, comma);
    spec = comma == std::string_view::npos ? std::string_view() : spec.substr(comma + 1);
    while (!item.empty() && item.front() == ' ') item.remove_prefix(1);
    while (!item.empty() && item.back() == ' ') item.remove_suffix(1);
    if (!item.empty()) apply_item(item, levels);
  }
  return levels;
}

// "[rm 12:34:56.789 4711 debug] text" to stderr. A line that cannot be written is lost: there is no
// other place to report it.
void write_line(LogLevel level, std::string_view text) {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  tm local{};
  localtime_r(&now.tv_sec, &local);
  char head[64];
  const int head_bytes = std::snprintf(
      head, sizeof(head), "[rm %02d:%02d:%02d.%03d %d %s] ", local.tm_hour, local.tm_min,
      local.tm_sec, static_cast<int>(now.tv_nsec / 1'000'000), static_cast<int>(getpid()),
      kLevels[static_cast<size_t>(level)].data());
  std::string line(head, static_cast<size_t>(head_bytes));
  line += text;
  line += '\n';
  std::string_view rest = line;
  while (!rest.empty()) {
    const ssize_t written = write(STDERR_FILENO, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    rest.remove_prefix(static_cast<size_t>(written));
  }
}

struct LogState {
  std::array<std::atomic<LogLevel>, kTopicCount> levels;

  LogState() {
    Levels initial;
    initial.fill(LogLevel::kWarn);
    if (const char* spec = std::getenv("RM_LOG")) {
      // A bad RM_LOG is reported by the options table; logging itself must not throw from here.
      try {
        initial = parse_levels(spec);
      } catch (const Error& error) {
        write_line(LogLevel::kWarn, error.what());
      }
    }
    store(initial);
  }

  void store(const Levels& values) {
    for (size_t i = 0; i < kTopicCount; ++i) levels[i].store(values[i], std::memory_order_relaxed);
  }
};

LogState& state() {
  static LogState* instance = new LogState;  // never destroyed: threads may log during exit
  return *instance;
}

}  // namespace

void configure_log(std::string_view spec) { state().store(parse_levels(spec)); }

void check_log_spec(std::string_view spec) { parse_levels(spec); }

bool log_enabled(LogTopic topic, LogLevel level) noexcept {
  return level >= state().levels[static_cast<size_t>(topic)].load(std::memory_order_relaxed);
}

void log_line(LogTopic topic, LogLevel level, std::string_view message) noexcept {
  if (!log_enabled(topic, level)) return;
  const int saved = errno;  // a log line must not change what the caller reads from errno
  try {
    write_line(level, std::string(kTopics[static_cast<size_t>(topic)]) + ": " + std::string(message));
  } catch (const std::bad_alloc&) {
    // no memory for the line: the caller's work goes on without it
  }
  errno = saved;
}

}  // namespace rm
