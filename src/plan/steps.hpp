// The low-level IR: a linear list of kernel calls over buffers.
//
// A Ref is a strided view of a buffer, so views (reshape, permute, slice, expand) cost nothing.
// A buffer has versions, as values have in SSA form. Plain steps write the first version, all of it
// before anything reads it; a step that updates memory in place makes the next one, and from then on
// nothing reads an older one.
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
  int32_t version = 0;
  bool present() const { return buffer >= 0; }
  /// Another view of the same content.
  Ref with(ir::Layout other) const { return {buffer, std::move(other), version}; }
};

struct Step {
  std::string op;
  ir::Attrs attrs;
  std::vector<Ref> inputs, outputs;
  bool updates = false;  // replaces its outputs' memory, or a part of it and keeps the rest
  size_t fresh = 0;      // of an update's outputs the first ones, which a plain step would write
  bool in_place = false;  // reads an element of what it updates only before it writes that element
};

struct StepList {
  std::vector<Buffer> buffers;
  std::vector<Step> steps;
  std::vector<Ref> outputs;  // of the graph, in order
};

}  // namespace rm::plan
