// The table of include/rm/ewise.h as data, and the arithmetic of its rows.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "ir/type.hpp"
#include "rm/ewise.h"

namespace rm::ops {

struct EwiseOpcode {
  std::string_view name;
  int opcode;
  int arity;        // operands read: 0 (const) to 3
  bool is_logical;  // the result is a bool (class 2, 0 or 1), whatever the operands are
  bool commutative;
};

/// Fields of one instruction in the attribute `code`.
inline constexpr int kEwiseFields = RM_EWISE_FIELDS;

/// The class an instruction computes in.
enum class EwiseClass : int64_t { kF32 = 0, kF64 = 1, kInt = 2 };
EwiseClass ewise_class(ir::DType dtype);

std::span<const EwiseOpcode> ewise_opcodes();
/// nullptr when no instruction has that name or number.
const EwiseOpcode* find_opcode(std::string_view name);
const EwiseOpcode* find_opcode(int64_t opcode);

/// One instruction on scalars. Floats are computed in double, `a`, `b`, `c` are what it reads.
double apply_float(int opcode, double a, double b, double c);
int64_t apply_int(int opcode, int64_t a, int64_t b, int64_t c);

}  // namespace rm::ops
