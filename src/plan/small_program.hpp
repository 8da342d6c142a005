// The program of a step `small_steps` (docs/operators.md), as integers: how many inner values there are,
// the type and the number of elements of each, then the parts, each of
//   operation, a, b, rank, sizes, number of operands, then the result and the operands.
// A result or operand is a place: of the step's inputs, then its outputs, then the inner values; of the
// latter two an offset and strides in elements follow. Inputs lie as the step's operands do.
#pragma once

#include <cstdint>
#include <string_view>

#include "ir/type.hpp"

namespace rm::plan::small {

/// ewise: a the first instruction, b how many. reduce: a the kind, b the axes as bits. softmax: a log.
/// gather: a the axis, b the size of what is looked into along it.
enum class Op : int64_t { ewise, reduce, softmax, gather };

struct Limits {
  static constexpr int64_t kElements = 4096;  // of a value
  static constexpr int64_t kMemory = 32 << 10;  // bytes of inner values
  static constexpr size_t kRank = 4, kOperands = 8, kSteps = 24, kSlots = 40, kInstructions = 96;
};
inline constexpr size_t kFields = 5;  // of an instruction

/// Of the reductions that a part may be; -1: none of them.
constexpr int64_t kind_of(std::string_view name) {
  constexpr std::string_view kNames[] = {"sum", "mean", "max", "min"};
  for (int64_t i = 0; i < 4; ++i) {
    if (kNames[i] == name) return i;
  }
  return -1;
}

/// A type as DLPack's code and bits.
inline int64_t code_of(ir::DType dtype) {
  const DLDataType t = ir::to_dlpack(dtype);
  return int64_t{t.code} << 8 | t.bits;
}

}  // namespace rm::plan::small
