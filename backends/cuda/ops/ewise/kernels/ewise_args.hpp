// What the ewise kernels are launched with. All of it travels by value, so a graph holds its own
// copy.
#pragma once

#include <cstdint>

#include "_shim/tensor_shim.hpp"
#include "ewise/api.hpp"

namespace rm::cuda_ops {

struct EwiseOperand {
  const void* data;
  DType dtype;
  std::int64_t stride[kMaxRank];
};

/// Where an instruction finds an operand, and the instruction itself.
struct EwiseStep {
  std::int16_t opcode, cls;
  std::int16_t a, b, c;  // interp: registers. chain: kFromAcc, operand index, or kFromSlot + slot
  std::int16_t dst;      // chain: slot the result is kept in, or -1 (only the next step reads it)
  float imm;             // chain: const's value
};

inline constexpr int kFromAcc = -1, kFromSlot = 64;
inline constexpr int kMaxSlots = 8;

struct EwiseArgs {
  void* y;
  DType y_dtype;
  int rank, steps, operands;
  std::uint32_t row_vectors, row_magic, row_shift;  // chain: vector / row_vectors; magic 0: divide
  std::int64_t total;
  std::int64_t shape[kMaxRank];  // collapsed
  std::int64_t y_stride[kMaxRank];
  EwiseOperand operand[kMaxOperands];
  EwiseStep step[kMaxInstructions];
  double imm[kMaxInstructions];  // interp
};

/// The fused kernel: how an operand lies against y, and its steps. A step's number is an opcode;
/// kFusedImm + opcode takes a constant, other binary opcodes the next operand.
inline constexpr int kFusedDense = 0, kFusedRow = 1, kFusedScalar = 2;
inline constexpr int kFusedImm = 128, kMaxFusedOperands = 3, kMaxFusedSteps = 12;

struct EwiseFusedArgs {
  void* y;
  const void* x[kMaxFusedOperands];
  std::int64_t vectors;
  std::uint32_t row_vectors, row_magic, row_shift;
  int operands, steps;
  int mode[kMaxFusedOperands];
  int step[kMaxFusedSteps];
  float imm[kMaxFusedSteps];
};

}  // namespace rm::cuda_ops
