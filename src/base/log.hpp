// Diagnostics by topic, to stderr. RM_LOG sets the levels ("cache=debug,plan"; a bare topic means
// debug, a bare level means every topic). Default warn: a successful run prints nothing.
#pragma once

#include <string>
#include <string_view>
#include <type_traits>

namespace rm {

enum class LogTopic {
  kBackend,
  kCache,
  kCapture,
  kConfig,
  kIr,
  kPasses,
  kPlan,
  kRoute,
  kRuntime,
  kSelect,
  kCount
};
enum class LogLevel { kTrace, kDebug, kInfo, kWarn, kError, kOff };

/// Replaces all levels by what `spec` says. Throws rm::Error naming the accepted topics and levels.
/// Until the first call the levels come from the environment's RM_LOG.
void configure_log(std::string_view spec);
/// Throws as configure_log does, and changes nothing.
void check_log_spec(std::string_view spec);

/// One relaxed atomic load: cheap enough for hot paths.
bool log_enabled(LogTopic topic, LogLevel level) noexcept;

/// Writes one line when the topic is enabled at the level. Thread safe.
void log_line(LogTopic topic, LogLevel level, std::string_view message) noexcept;

/// `message` is a string, or a callable that makes one and runs only when the line is wanted.
template <typename Message>
void log_message(LogTopic topic, LogLevel level, const Message& message) {
  if (!log_enabled(topic, level)) return;
  if constexpr (std::is_invocable_v<Message>) {
    log_line(topic, level, std::string(message()));
  } else {
    log_line(topic, level, message);
  }
}

template <typename M>
void log_debug(LogTopic t, const M& m) {
  log_message(t, LogLevel::kDebug, m);
}
template <typename M>
void log_info(LogTopic t, const M& m) {
  log_message(t, LogLevel::kInfo, m);
}
template <typename M>
void log_warn(LogTopic t, const M& m) {
  log_message(t, LogLevel::kWarn, m);
}
template <typename M>
void log_error(LogTopic t, const M& m) {
  log_message(t, LogLevel::kError, m);
}

}  // namespace rm
