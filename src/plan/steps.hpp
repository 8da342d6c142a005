// The low-level IR: a linear list of kernel calls over buffers.
//
// A Ref is a strided view of a buffer, so views (reshape, permute, slice, expand) cost nothing.
// Every temporary is written before it is read, and only by the steps that have it as an output.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ir/graph.hpp"
#include "ir/layout.hpp"

namespace rm::plan {

enum class BufferKind : uint8_t { kInput, kOutput, kConstant, kTemp };

struct Buffer {
  BufferKind kind = BufferKind::kTemp;
  int32_t index = 0;   // which input, output or constant
  int64_t bytes = 0;
  bool donated = false;  // an input that steps may write: the caller gave its memory away
};

struct Ref {
  int32_t buffer = -1;  // -1: absent optional operand
  ir::Layout layout;
  bool present() const { return buffer >= 0; }
};

struct Step {
  std::string op;
  ir::Attrs attrs;
  std::vector<Ref> inputs, outputs;
  bool updates = false;  // writes a part of its outputs: what they held stays readable
};

struct StepList {
  std::vector<Buffer> buffers;
  std::vector<Step> steps;
  std::vector<Ref> outputs;  // of the graph, in order
};

}  // namespace rm::plan
