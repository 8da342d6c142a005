// What the tests of this folder share: where the odd plugins lie, and errors as values.
#pragma once

#include <filesystem>
#include <string>

#include "backend/plugin_loader.hpp"
#include "base/error.hpp"

namespace rm::test {

inline std::filesystem::path odd_plugin(int kind) {
  return std::filesystem::path(RM_ODD_FOLDER) / ("odd_" + std::to_string(kind) + ".so");
}

struct Failure {
  bool failed = false;
  rm_code code = RM_OK;
  std::string reason, message;
  bool says(const std::string& text) const { return message.find(text) != std::string::npos; }
};

/// What `body` throws, as a value; anything but rm::Error is a failure of the test.
template <class Body>
Failure failure_of(Body body) {
  try {
    body();
  } catch (const Error& e) {
    return {true, e.code(), e.reason(), e.what()};
  }
  return {};
}

}  // namespace rm::test
