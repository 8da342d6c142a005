// Topic levels are the parsed form of the option `log`; spdlog formats and writes the lines.
#include "base/log.hpp"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>

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

struct LogState {
  std::array<std::atomic<LogLevel>, kTopicCount> levels;
  // Never destroyed: threads may still log while the process exits.
  std::shared_ptr<spdlog::logger> logger;

  LogState() {
    auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    logger = std::make_shared<spdlog::logger>("rm", std::move(sink));
    logger->set_level(spdlog::level::trace);
    logger->set_pattern("[rm %H:%M:%S.%e %P %l] %v");
    logger->flush_on(spdlog::level::trace);
    Levels initial;
    initial.fill(LogLevel::kWarn);
    if (const char* spec = std::getenv("RM_LOG")) {
      // A bad RM_LOG is reported by the options table; logging itself must not throw from here.
      try {
        initial = parse_levels(spec);
      } catch (const Error& error) {
        logger->warn("{}", error.what());
      }
    }
    store(initial);
  }

  void store(const Levels& values) {
    for (size_t i = 0; i < kTopicCount; ++i) levels[i].store(values[i], std::memory_order_relaxed);
  }
};

LogState& state() {
  static LogState* instance = new LogState;
  return *instance;
}

spdlog::level::level_enum spdlog_level(LogLevel level) {
  constexpr std::array<spdlog::level::level_enum, 6> kMap = {
      spdlog::level::trace, spdlog::level::debug, spdlog::level::info,
      spdlog::level::warn,  spdlog::level::err,   spdlog::level::off};
  return kMap[static_cast<size_t>(level)];
}

}  // namespace

void configure_log(std::string_view spec) { state().store(parse_levels(spec)); }

void check_log_spec(std::string_view spec) { parse_levels(spec); }

bool log_enabled(LogTopic topic, LogLevel level) noexcept {
  return level >= state().levels[static_cast<size_t>(topic)].load(std::memory_order_relaxed);
}

void log_line(LogTopic topic, LogLevel level, std::string_view message) noexcept {
  if (!log_enabled(topic, level)) return;
  state().logger->log(spdlog_level(level), "{}: {}", kTopics[static_cast<size_t>(topic)], message);
}

}  // namespace rm
