// Topics and levels, as RM_LOG gives them.
#include "base/log.hpp"

#include <doctest/doctest.h>
#include <unistd.h>

#include <cerrno>
#include <regex>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

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

TEST_CASE("a line has time, process, level and topic, and lines of several threads do not mix") {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const int saved = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  rm::configure_log("");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 50; ++i) {
        errno = 42;
        rm::log_warn(LogTopic::kCache, std::string(100, static_cast<char>('a' + t)));
        CHECK(errno == 42);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  dup2(saved, STDERR_FILENO);
  close(saved);
  close(ends[1]);
  std::string text;
  char piece[4096];
  for (ssize_t got; (got = read(ends[0], piece, sizeof(piece))) > 0;) text.append(piece, got);
  close(ends[0]);
  const std::regex line(R"(\[rm \d\d:\d\d:\d\d\.\d{3} )" + std::to_string(getpid()) +
                        R"( warn\] cache: (a{100}|b{100}|c{100}|d{100}))");
  int lines = 0;
  std::istringstream stream(text);
  for (std::string got; std::getline(stream, got); ++lines) CHECK(std::regex_match(got, line));
  CHECK(lines == 200);
}
