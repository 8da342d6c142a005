// The opcodes of ewise programs, numbered as docs/operators.md numbers them.
#pragma once

namespace rm::cuda_ops {

enum EwiseOpcode : int {
  kConst = 0,
  kCopy = 1,
  kNeg = 2,
  kAbs = 3,
  kExp = 4,
  kLog = 5,
  kSqrt = 6,
  kRsqrt = 7,
  kSin = 8,
  kCos = 9,
  kTanh = 10,
  kErf = 11,
  kSigmoid = 12,
  kRelu = 13,
  kGelu = 14,
  kGeluTanh = 15,
  kSilu = 16,
  kLogicalNot = 17,
  kReciprocal = 18,
  kFloor = 19,
  kCeil = 20,
  kRound = 21,
  kSign = 22,
  kSoftplus = 23,
  kLog1p = 24,
  kExpm1 = 25,
  kIsNan = 26,
  kTrunc = 27,
  kAdd = 40,
  kSub = 41,
  kMul = 42,
  kDiv = 43,
  kPow = 44,
  kMinimum = 45,
  kMaximum = 46,
  kFloorDiv = 47,
  kRemainder = 48,
  kEq = 49,
  kNe = 50,
  kLt = 51,
  kLe = 52,
  kGt = 53,
  kGe = 54,
  kAnd = 55,
  kOr = 56,
  kXor = 57,
  kWhere = 70,
  kFma = 71
};

/// Operands of an opcode; 0 for const, -1 for a number that is no opcode.
inline int arity_of(int opcode) {
  if (opcode == kConst) return 0;
  if (opcode >= kCopy && opcode <= kTrunc) return 1;
  if (opcode >= kAdd && opcode <= kXor) return 2;
  if (opcode == kWhere || opcode == kFma) return 3;
  return -1;
}

/// Comparisons and logical operators: class i64, 0 or 1.
inline bool gives_bool(int opcode) {
  return opcode == kLogicalNot || opcode == kIsNan || (opcode >= kEq && opcode <= kGe);
}

}  // namespace rm::cuda_ops

// Every opcode once, for switches that become templates.
#define RM_EWISE_UNARY(X)                                                                        \
  X(kCopy)                                                                                       \
  X(kNeg)                                                                                        \
  X(kAbs)                                                                                        \
  X(kExp)                                                                                        \
  X(kLog)                                                                                        \
  X(kSqrt)                                                                                       \
  X(kRsqrt) X(kSin) X(kCos) X(kTanh) X(kErf) X(kSigmoid) X(kRelu) X(kGelu) X(kGeluTanh) X(kSilu) \
      X(kLogicalNot) X(kReciprocal) X(kFloor) X(kCeil) X(kRound) X(kSign) X(kSoftplus) X(kLog1p) \
          X(kExpm1) X(kIsNan) X(kTrunc)
#define RM_EWISE_BINARY(X)                                                                        \
  X(kAdd)                                                                                         \
  X(kSub)                                                                                         \
  X(kMul)                                                                                         \
  X(kDiv)                                                                                         \
  X(kPow)                                                                                         \
  X(kMinimum)                                                                                     \
  X(kMaximum) X(kFloorDiv) X(kRemainder) X(kEq) X(kNe) X(kLt) X(kLe) X(kGt) X(kGe) X(kAnd) X(kOr) \
      X(kXor)
#define RM_EWISE_TERNARY(X) X(kWhere) X(kFma)
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
