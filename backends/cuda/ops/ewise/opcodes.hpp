// The opcodes of ewise programs by name, and which of them each kernel applies.
#pragma once

#include "rm/ewise.h"

namespace rm::cuda_ops {

using namespace ewise;

/// Comparisons and logical operators: class i64, 0 or 1.
inline bool gives_bool(int opcode) { return is_logical(opcode); }

}  // namespace rm::cuda_ops

// What the fused kernel applies.
#define RM_EWISE_FUSED_UNARY(X) \
  X(kNeg) X(kAbs) X(kExp) X(kTanh) X(kSigmoid) X(kRelu) X(kGelu) X(kGeluTanh) X(kSilu)
#define RM_EWISE_FUSED_BINARY(X) X(kAdd) X(kSub) X(kMul) X(kMinimum) X(kMaximum)
// What the chain kernel applies to all values at once, and what value by value.
#define RM_EWISE_CHAIN_UNARY(X)                                                                  \
  X(kCopy)                                                                                       \
  X(kNeg)                                                                                        \
  X(kAbs)                                                                                        \
  X(kExp)                                                                                        \
  X(kSqrt) X(kRsqrt) X(kTanh) X(kSigmoid) X(kRelu) X(kGelu) X(kGeluTanh) X(kSilu) X(kLogicalNot) \
      X(kReciprocal) X(kIsNan)
#define RM_EWISE_CHAIN_BINARY(X) \
  X(kAdd)                        \
  X(kSub)                        \
  X(kMul)                        \
  X(kDiv) X(kMinimum) X(kMaximum) X(kEq) X(kNe) X(kLt) X(kLe) X(kGt) X(kGe) X(kAnd) X(kOr) X(kXor)
#define RM_EWISE_RARE_UNARY(X) \
  X(kLog)                      \
  X(kSin)                      \
  X(kCos) X(kErf) X(kFloor) X(kCeil) X(kRound) X(kSign) X(kSoftplus) X(kLog1p) X(kExpm1) X(kTrunc)
#define RM_EWISE_RARE_BINARY(X) X(kPow) X(kFloorDiv) X(kRemainder)

namespace rm::cuda_ops {

/// The chain kernel's own numbers, without gaps, so that its switch is one jump. Of an operand and
/// a constant, of a value and itself, then the opcodes above, those with a second operand last.
enum EwiseChainOp : int {
  kChainAddImm,
  kChainMulImm,
  kChainSquare,
#define RM_CASE(name) kChain_##name,
  RM_EWISE_CHAIN_UNARY(RM_CASE)
#undef RM_CASE
      kChainRareUnary,
  kChainBinary,  // from here b is read
  kChainRareBinary = kChainBinary,
  kChainWhere,       // acc ? b : c
  kChainWhereTrue,   // b ? acc : c
  kChainWhereFalse,  // b ? c : acc
  kChainFma,
#define RM_CASE(name) kChain_##name,
  RM_EWISE_CHAIN_BINARY(RM_CASE)
#undef RM_CASE
};

/// The chain kernel's number of an opcode; of rare ones the opcode itself travels as place of c.
inline int chain_op_of(int opcode) {
  switch (opcode) {
#define RM_CASE(name) \
  case name:          \
    return kChain_##name;
    RM_EWISE_CHAIN_UNARY(RM_CASE)
    RM_EWISE_CHAIN_BINARY(RM_CASE)
#undef RM_CASE
    case kWhere:
      return kChainWhere;
    case kFma:
      return kChainFma;
    default:
      return arity_of(opcode) == 2 ? kChainRareBinary : kChainRareUnary;
  }
}

}  // namespace rm::cuda_ops
