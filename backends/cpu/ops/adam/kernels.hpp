// Entry points of adam at one level.
#pragma once

#include "common/types.hpp"

namespace rm::cpu {

/// In the order of the operator's operands and, behind them, results.
enum AdamPointer : int {
  kParameter, kGradient, kMean, kSquare, kLargest,
  kNewParameter, kNewMean, kNewSquare, kNewLargest,
  kAdamPointers
};

enum class AdamDecay : uint8_t { none, gradient, parameter };

/// Elements of the operand `numbers`.
enum AdamNumber : int { kDecay, kKeep, kNew1, kOld2, kNew2, kEps, kStep, kRoot, kAdamNumbers };

struct AdamArgs {
  void* pointer[kAdamPointers];  // results may be the operands they replace; no largest: nullptr
  int64_t step[kAdamPointers];   // elements
  int64_t n;
  const void* numbers;
  int64_t number_step;
  AdamDecay decay;
  bool maximize;
};

/// Numbers below the smallest normal one count as zero where that cannot be seen in the parameter:
/// see docs/decisions/0140-small-moments-are-zero.md.
struct AdamTable {
  void (*f32)(const AdamArgs&);
  void (*f64)(const AdamArgs&);
};

}  // namespace rm::cpu
