// Just enough of the IR's text form (docs/plugin_guide.md) for a device that only looks at operator
// names and types: one record a line, in program order.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace rm::sim {

struct Type {
  std::string dtype;  ///< "f32"
  std::vector<int64_t> dims;
  bool is_static = true;  ///< false when a dim is an expression of symbols
  uint64_t bytes() const;
  DLDataType dl_dtype() const;
};

struct Node {
  std::string op;
  std::vector<Type> results;
};

struct Program {
  std::vector<Node> nodes;
  std::vector<Type> inputs, weights;
  std::vector<bool> donated;  ///< by input: a state, which lies in a buffer of the device
  std::vector<std::string> weight_names;
};

/// Throws rm::plugin::Error(RM_INVALID_ARGUMENT) with the line that is not understood.
Program parse(std::string_view text);

/// The same program with every f32 result rounded to bfloat16 and back.
std::string round_to_bf16(std::string_view text);

}  // namespace rm::sim
