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

/// An instruction of the interpreter: registers.
struct EwiseStep {
  std::int16_t opcode, cls, a, b, c;
};

struct EwiseArgs {
  void* y;
  DType y_dtype;
  int rank, steps, operands;
  std::int64_t total;
  std::int64_t shape[kMaxRank];  // collapsed
  std::int64_t y_stride[kMaxRank];
  EwiseOperand operand[kMaxOperands];
  EwiseStep step[kMaxInstructions];
  double imm[kMaxInstructions];
};

/// The chain kernel: 16 values a thread, that wait in its column of shared memory. Places count
/// 16 bytes of a thread.
inline constexpr int kChainThreads = 128, kChainValues = 16, kMaxChainSlots = 8;
enum EwiseFrom : std::uint8_t {
  kFromAcc,    // the step before
  kFromImm,    // b: the step's imm; a and c: place is a number in imm
  kFromSplat,  // float32, one a vector
  kFromF32,    // as operands of float32 wait, and kept results
  kFromBf16,
  kFromF16,
  kFromBool
};
inline constexpr int kChainDense = 0, kChainRow = 1, kChainStrided = 2;

struct EwiseChainOperand {
  const void* data;
  EwiseFrom kind;                   // of its dtype
  std::uint8_t mode, inner, place;  // inner: stride of the innermost axis
  std::int64_t stride[kMaxRank];
};

/// acc = op(a, b, c); keep: where the result goes too.
struct alignas(16) EwiseChainStep {
  std::uint8_t op;
  EwiseFrom from[3];
  std::uint8_t place[3], keep;
  float imm;
};
inline constexpr int kChainNotKept = 0xff;

struct EwiseChainArgs {
  void* y;
  std::uint32_t vectors, row_vectors, row_magic, row_shift;  // magic 0: a row is one vector
  int rank, steps, operands, y_kind, scratch;
  EwiseChainStep step[kMaxInstructions + 1];
  float imm[kMaxInstructions];
  EwiseChainOperand operand[kMaxOperands];
  std::uint32_t shape[kMaxRank];
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
