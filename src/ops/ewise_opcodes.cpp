// The opcode table and its arithmetic, after torch: NaN wins in minimum and maximum, rounding is
// half to even, remainder has the divisor's sign.
#include "ops/ewise_opcodes.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/error.hpp"

namespace rm::ops {

using namespace ewise;

namespace {

enum Result { VALUE, LOGICAL };

constexpr EwiseOpcode kTable[] = {
#define RM_ROW(id, name, number, arity, operands, result, commutative, note) \
  {name, number, arity, result == LOGICAL, commutative != 0},
    RM_EWISE_OPCODES(RM_ROW)
#undef RM_ROW
};

constexpr double kSqrt2OverPi = 0.79788456080286535588;

[[noreturn]] void unknown(int opcode, const char* where) {
  throw_invalid("[ewise] expected an opcode with a meaning for " + std::string(where) + ", got " +
                std::to_string(opcode));
}

double sigmoid(double a) { return 1.0 / (1.0 + std::exp(-a)); }

double unary_float(int opcode, double a) {
  switch (opcode) {
    case kCopy:
      return a;
    case kNeg:
      return -a;
    case kAbs:
      return std::fabs(a);
    case kExp:
      return std::exp(a);
    case kLog:
      return std::log(a);
    case kSqrt:
      return std::sqrt(a);
    case kRsqrt:
      return 1.0 / std::sqrt(a);
    case kSin:
      return std::sin(a);
    case kCos:
      return std::cos(a);
    case kTanh:
      return std::tanh(a);
    case kErf:
      return std::erf(a);
    case kSigmoid:
      return sigmoid(a);
    case kRelu:
      return a < 0 ? 0.0 : a;  // NaN stays NaN
    case kGelu:
      return 0.5 * a * (1.0 + std::erf(a * 0.70710678118654752440));
    case kGeluTanh:
      return 0.5 * a * (1.0 + std::tanh(kSqrt2OverPi * (a + 0.044715 * a * a * a)));
    case kSilu:
      return a * sigmoid(a);
    case kLogicalNot:
      return a == 0 ? 1.0 : 0.0;
    case kReciprocal:
      return 1.0 / a;
    case kFloor:
      return std::floor(a);
    case kCeil:
      return std::ceil(a);
    case kRound:
      return std::nearbyint(a);
    case kSign:
      return std::isnan(a) ? a : static_cast<double>((a > 0) - (a < 0));
    case kSoftplus:
      return a > 20 ? a : std::log1p(std::exp(a));  // torch's threshold
    case kLog1p:
      return std::log1p(a);
    case kExpm1:
      return std::expm1(a);
    case kIsNan:
      return std::isnan(a) ? 1.0 : 0.0;
    case kTrunc:
      return std::trunc(a);
    default:
      unknown(opcode, "one float operand");
  }
}

double remainder_float(double a, double b) {
  double r = std::fmod(a, b);
  return r != 0 && ((r < 0) != (b < 0)) ? r + b : r;
}

double binary_float(int opcode, double a, double b) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  bool nan = std::isnan(a) || std::isnan(b);
  switch (opcode) {
    case kAdd:
      return a + b;
    case kSub:
      return a - b;
    case kMul:
      return a * b;
    case kDiv:
      return a / b;
    case kPow:
      return std::pow(a, b);
    case kMinimum:
      return nan ? kNaN : std::min(a, b);
    case kMaximum:
      return nan ? kNaN : std::max(a, b);
    case kFloorDiv:
      return std::floor(a / b);
    case kRemainder:
      return remainder_float(a, b);
    case kEq:
      return a == b ? 1.0 : 0.0;
    case kNe:
      return a != b ? 1.0 : 0.0;
    case kLt:
      return a < b ? 1.0 : 0.0;
    case kLe:
      return a <= b ? 1.0 : 0.0;
    case kGt:
      return a > b ? 1.0 : 0.0;
    case kGe:
      return a >= b ? 1.0 : 0.0;
    default:
      unknown(opcode, "two float operands");
  }
}

// Wrapping arithmetic, as two's complement hardware and torch give.
int64_t wrap(uint64_t v) { return static_cast<int64_t>(v); }

int64_t power(int64_t base, int64_t exponent) {
  if (exponent < 0) return base == 1 ? 1 : (base == -1 ? (exponent % 2 != 0 ? -1 : 1) : 0);
  uint64_t out = 1, b = static_cast<uint64_t>(base);
  for (; exponent != 0; exponent >>= 1, b *= b) {
    if ((exponent & 1) != 0) out *= b;
  }
  return wrap(out);
}

int64_t floor_div(int64_t a, int64_t b) {
  if (b == 0) throw_invalid("[ewise] expected a non-zero integer divisor, got 0");
  if (b == -1) return wrap(0 - static_cast<uint64_t>(a));
  int64_t q = a / b;
  return (a % b != 0 && ((a < 0) != (b < 0))) ? q - 1 : q;
}

int64_t unary_int(int opcode, int64_t a) {
  switch (opcode) {
    case kCopy:
    case kFloor:
    case kCeil:
    case kRound:
    case kTrunc:
      return a;
    case kNeg:
      return wrap(0 - static_cast<uint64_t>(a));
    case kAbs:
      return a < 0 ? wrap(0 - static_cast<uint64_t>(a)) : a;
    case kRelu:
      return std::max<int64_t>(a, 0);
    case kLogicalNot:
      return a == 0 ? 1 : 0;
    case kSign:
      return (a > 0) - (a < 0);
    case kIsNan:
      return 0;
    default:
      unknown(opcode, "one integer operand");
  }
}

int64_t binary_int(int opcode, int64_t a, int64_t b) {
  auto ua = static_cast<uint64_t>(a), ub = static_cast<uint64_t>(b);
  switch (opcode) {
    case kAdd:
      return wrap(ua + ub);
    case kSub:
      return wrap(ua - ub);
    case kMul:
      return wrap(ua * ub);
    case kPow:
      return power(a, b);
    case kMinimum:
      return std::min(a, b);
    case kMaximum:
      return std::max(a, b);
    case kFloorDiv:
      return floor_div(a, b);
    case kRemainder:
      return wrap(ua - static_cast<uint64_t>(floor_div(a, b)) * ub);
    case kEq:
      return a == b;
    case kNe:
      return a != b;
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    case kGe:
      return a >= b;
    case kAnd:
      return a & b;
    case kOr:
      return a | b;
    case kXor:
      return a ^ b;
    default:
      unknown(opcode, "two integer operands");
  }
}

}  // namespace

EwiseClass ewise_class(ir::DType dtype) {
  if (dtype == ir::DType::kF64) return EwiseClass::kF64;
  return ir::is_floating(dtype) ? EwiseClass::kF32 : EwiseClass::kInt;
}

std::span<const EwiseOpcode> ewise_opcodes() { return kTable; }

const EwiseOpcode* find_opcode(std::string_view name) {
  for (const auto& row : kTable) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

const EwiseOpcode* find_opcode(int64_t opcode) {
  for (const auto& row : kTable) {
    if (row.opcode == opcode) return &row;
  }
  return nullptr;
}

double apply_float(int opcode, double a, double b, double c) {
  if (opcode == kWhere) return a != 0 ? b : c;
  if (opcode == kFma) return a * b + c;
  return arity_of(opcode) == 2 ? binary_float(opcode, a, b) : unary_float(opcode, a);
}

int64_t apply_int(int opcode, int64_t a, int64_t b, int64_t c) {
  if (opcode == kWhere) return a != 0 ? b : c;
  if (opcode == kFma) {
    return wrap(static_cast<uint64_t>(a) * static_cast<uint64_t>(b) + static_cast<uint64_t>(c));
  }
  return arity_of(opcode) == 2 ? binary_int(opcode, a, b) : unary_int(opcode, a);
}

}  // namespace rm::ops
