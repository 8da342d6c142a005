// The opcodes of ewise programs, numbered as docs/operators.md numbers them.
#pragma once

namespace rm::cpu {

enum EwiseOpcode : int {
  kConst = 0, kCopy = 1, kNeg = 2, kAbs = 3, kExp = 4, kLog = 5, kSqrt = 6, kRsqrt = 7, kSin = 8,
  kCos = 9, kTanh = 10, kErf = 11, kSigmoid = 12, kRelu = 13, kGelu = 14, kGeluTanh = 15,
  kSilu = 16, kLogicalNot = 17, kReciprocal = 18, kFloor = 19, kCeil = 20, kRound = 21, kSign = 22,
  kSoftplus = 23, kLog1p = 24, kExpm1 = 25, kIsNan = 26, kTrunc = 27,
  kAdd = 40, kSub = 41, kMul = 42, kDiv = 43, kPow = 44, kMinimum = 45, kMaximum = 46,
  kFloorDiv = 47, kRemainder = 48, kEq = 49, kNe = 50, kLt = 51, kLe = 52, kGt = 53, kGe = 54,
  kAnd = 55, kOr = 56, kXor = 57,
  kWhere = 70, kFma = 71
};

}  // namespace rm::cpu
