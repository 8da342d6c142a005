// Topics and levels, as RM_LOG gives them.
#include "base/log.hpp"

#include <doctest/doctest.h>

#include <string>

#include "base/error.hpp"

using rm::LogLevel;
using rm::LogTopic;

TEST_CASE("only warnings are written unless asked") {
  rm::configure_log("");
  CHECK_FALSE(rm::log_enabled(LogTopic::kCache, LogLevel::kInfo));
  CHECK(rm::log_enabled(LogTopic::kCache, LogLevel::kWarn));
}

TEST_CASE("a bare topic means debug and others stay as they were") {
  rm::configure_log("cache=info, plan");
  CHECK(rm::log_enabled(LogTopic::kCache, LogLevel::kInfo));
  CHECK_FALSE(rm::log_enabled(LogTopic::kCache, LogLevel::kDebug));
  CHECK(rm::log_enabled(LogTopic::kPlan, LogLevel::kDebug));
  CHECK_FALSE(rm::log_enabled(LogTopic::kRoute, LogLevel::kInfo));
  rm::configure_log("");
}

TEST_CASE("a bare level is for every topic") {
  rm::configure_log("error,cache=debug");
  CHECK(rm::log_enabled(LogTopic::kCache, LogLevel::kDebug));
  CHECK_FALSE(rm::log_enabled(LogTopic::kPlan, LogLevel::kWarn));
  rm::configure_log("");
}

TEST_CASE("an unknown topic or level is refused by name and changes nothing") {
  rm::configure_log("cache");
  for (const char* bad : {"cahce", "cache=loud", "plan,=debug"}) {
    CHECK_THROWS_WITH_AS(rm::configure_log(bad), doctest::Contains("got '"), rm::Error);
  }
  CHECK(rm::log_enabled(LogTopic::kCache, LogLevel::kDebug));
  rm::configure_log("");
}

TEST_CASE("a message that is not wanted is never made") {
  rm::configure_log("");
  bool made = false;
  rm::log_debug(LogTopic::kCache, [&] {
    made = true;
    return std::string("text");
  });
  CHECK_FALSE(made);
}
