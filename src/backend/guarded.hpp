// Structs a plugin fills: handed out with a canary behind them, so a plugin that believes the
// struct is longer than struct_size says is an error, not a corrupted stack.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>

#include "base/error.hpp"

namespace rm::backend {

/// Calls fill(T*) and returns the struct: struct_size is the host's on the way in and what the
/// plugin knows on the way out (fields behind it stay zero).
template <class T, class Fill>
T fill_guarded(const char* what, Fill fill) {
  constexpr size_t kGuardBytes = 256;
  constexpr std::byte kCanary{0xA5};
  struct {
    T value{};
    std::byte guard[kGuardBytes];
  } memory;
  std::fill(std::begin(memory.guard), std::end(memory.guard), kCanary);
  memory.value.struct_size = sizeof(T);
  fill(&memory.value);
  const bool intact = std::all_of(std::begin(memory.guard), std::end(memory.guard),
                                  [&](std::byte b) { return b == kCanary; });
  if (!intact || memory.value.struct_size > sizeof(T)) {
    throw Error(RM_INTERNAL, std::string("[") + what + "] expected at most " +
                                 std::to_string(sizeof(T)) +
                                 " bytes, got more: the plugin ignores struct_size");
  }
  return memory.value;
}

}  // namespace rm::backend
