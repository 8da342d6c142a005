// An ewise program compiled for blocks: conversions made explicit, registers mapped to few slots.
#pragma once

#include <vector>

#include "common/problem.hpp"
#include "isa.hpp"
#include "ops/ewise/kernels.hpp"

namespace rm::cpu {

/// A slot holds one block of one class. Operand slots may instead point straight into the operand.
struct MicroOp {
  EwiseFn fn;
  int dst, a, b, c;  // slots; -1 = unused; c = kFlagSlot: the error flag
};
inline constexpr int kFlagSlot = -2;

struct OperandLoad {
  int operand, slot;
  EwiseLoad load;
  int64_t element_bytes, class_bytes;
  bool same_type;  // the operand's storage is the class: a dense block needs no copy
};

struct ConstantFill {
  int slot;
  Class cls;
  double value;
};

struct EwiseProgram {
  std::vector<OperandLoad> loads;
  std::vector<ConstantFill> constants;
  std::vector<MicroOp> ops;
  int result = -1;  // slot stored to y
  EwiseStore store = nullptr;
  int64_t result_bytes = 4;    // an element of the result slot
  bool result_direct = false;  // the last op may write y itself
  int slots = 0;
  int64_t element_bytes = 4;  // of the widest class in use
  double ns_per_element = 0;  // one thread, AVX2, data in cache
};

/// Throws std::invalid_argument when the program is not legal.
EwiseProgram compile_ewise(const Problem& problem, Isa isa);

}  // namespace rm::cpu
