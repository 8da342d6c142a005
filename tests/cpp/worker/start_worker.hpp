// Starts the worker of these tests, and small helpers around it.
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <memory>
#include <string>

#include "base/error.hpp"
#include "worker/client.hpp"

namespace rm::test {

using Clock = std::chrono::steady_clock;

inline worker::Worker::Options options() {
  worker::Worker::Options out;
  out.process.command = {"/proc/self/exe", "--serve"};
  out.process.environment = {"PATH=/usr/bin:/bin"};
  out.start_timeout_s = 60;
  return out;
}

inline std::shared_ptr<worker::Worker> start() { return worker::Worker::start(options(), {}); }

/// One that runs several programs at once.
inline std::shared_ptr<worker::Worker> start(const char* executions) {
  worker::Worker::Options several = options();
  several.process.command.emplace_back(executions);
  return worker::Worker::start(several, {});
}

inline std::shared_ptr<worker::LoadedProgram> load(worker::Worker& worker,
                                                   const std::string& artefact, int64_t size = 4) {
  worker::TensorSlot slot{"", {kDLFloat, 32, 1}, {size}, 0, 0, ""};
  return worker.load({0, artefact, {}, {slot}, {slot}, {}}, nullptr, {60, {}});
}

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

template <class Body>
Error failure_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  FAIL("it did not fail");
  return Error(RM_OK, "");
}

/// 'R', 'S', 'T' (stopped), 'Z' ...; 0 when there is no such process.
inline char state_of(pid_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  FILE* file = std::fopen(path.c_str(), "r");
  if (file == nullptr) return 0;
  char state = 0;
  const int got = std::fscanf(file, "%*d (%*[^)]) %c", &state);
  std::fclose(file);
  return got == 1 ? state : 0;
}

}  // namespace rm::test
