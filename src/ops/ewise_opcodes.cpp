// The opcode table and its arithmetic, after torch: NaN wins in minimum and maximum, rounding is
// half to even, remainder has the divisor's sign.
#include "ops/ewise_opcodes.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "base/error.hpp"

namespace rm::ops {
namespace {

// clang-format off
constexpr EwiseOpcode kTable[] = {
    {"const", 0, 0, false, false},     {"copy", 1, 1, false, false},
    {"neg", 2, 1, false, false},       {"abs", 3, 1, false, false},
    {"exp", 4, 1, false, false},       {"log", 5, 1, false, false},
    {"sqrt", 6, 1, false, false},      {"rsqrt", 7, 1, false, false},
    {"sin", 8, 1, false, false},       {"cos", 9, 1, false, false},
    {"tanh", 10, 1, false, false},     {"erf", 11, 1, false, false},
    {"sigmoid", 12, 1, false, false},  {"relu", 13, 1, false, false},
    {"gelu", 14, 1, false, false},     {"gelu_tanh", 15, 1, false, false},
    {"silu", 16, 1, false, false},     {"logical_not", 17, 1, true, false},
    {"reciprocal", 18, 1, false, false}, {"floor", 19, 1, false, false},
    {"ceil", 20, 1, false, false},     {"round", 21, 1, false, false},
    {"sign", 22, 1, false, false},     {"softplus", 23, 1, false, false},
    {"log1p", 24, 1, false, false},    {"expm1", 25, 1, false, false},
    {"isnan", 26, 1, true, false},     {"trunc", 27, 1, false, false},
    {"add", 40, 2, false, true},       {"sub", 41, 2, false, false},
    {"mul", 42, 2, false, true},       {"div", 43, 2, false, false},
    {"pow", 44, 2, false, false},      {"minimum", 45, 2, false, true},
    {"maximum", 46, 2, false, true},   {"floor_div", 47, 2, false, false},
    {"remainder", 48, 2, false, false}, {"eq", 49, 2, true, true},
    {"ne", 50, 2, true, true},         {"lt", 51, 2, true, false},
    {"le", 52, 2, true, false},        {"gt", 53, 2, true, false},
    {"ge", 54, 2, true, false},        {"and", 55, 2, false, true},
    {"or", 56, 2, false, true},        {"xor", 57, 2, false, true},
    {"where", 70, 3, false, false},    {"fma", 71, 3, false, false},
};
// clang-format on

constexpr double kSqrt2OverPi = 0.79788456080286535588;

[[noreturn]] void unknown(int opcode, const char* where) {
  throw_invalid("[ewise] expected an opcode with a meaning for " + std::string(where) + ", got " +
                std::to_string(opcode));
}

double sigmoid(double a) { return 1.0 / (1.0 + std::exp(-a)); }

double unary_float(int opcode, double a) {
  switch (opcode) {
    case 1:
      return a;
    case 2:
      return -a;
    case 3:
      return std::fabs(a);
    case 4:
      return std::exp(a);
    case 5:
      return std::log(a);
    case 6:
      return std::sqrt(a);
    case 7:
      return 1.0 / std::sqrt(a);
    case 8:
      return std::sin(a);
    case 9:
      return std::cos(a);
    case 10:
      return std::tanh(a);
    case 11:
      return std::erf(a);
    case 12:
      return sigmoid(a);
    case 13:
      return a < 0 ? 0.0 : a;  // NaN stays NaN
    case 14:
      return 0.5 * a * (1.0 + std::erf(a * 0.70710678118654752440));
    case 15:
      return 0.5 * a * (1.0 + std::tanh(kSqrt2OverPi * (a + 0.044715 * a * a * a)));
    case 16:
      return a * sigmoid(a);
    case 17:
      return a == 0 ? 1.0 : 0.0;
    case 18:
      return 1.0 / a;
    case 19:
      return std::floor(a);
    case 20:
      return std::ceil(a);
    case 21:
      return std::nearbyint(a);
    case 22:
      return std::isnan(a) ? a : static_cast<double>((a > 0) - (a < 0));
    case 23:
      return a > 20 ? a : std::log1p(std::exp(a));  // torch's threshold
    case 24:
      return std::log1p(a);
    case 25:
      return std::expm1(a);
    case 26:
      return std::isnan(a) ? 1.0 : 0.0;
    case 27:
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
    case 40:
      return a + b;
    case 41:
      return a - b;
    case 42:
      return a * b;
    case 43:
      return a / b;
    case 44:
      return std::pow(a, b);
    case 45:
      return nan ? kNaN : std::min(a, b);
    case 46:
      return nan ? kNaN : std::max(a, b);
    case 47:
      return std::floor(a / b);
    case 48:
      return remainder_float(a, b);
    case 49:
      return a == b ? 1.0 : 0.0;
    case 50:
      return a != b ? 1.0 : 0.0;
    case 51:
      return a < b ? 1.0 : 0.0;
    case 52:
      return a <= b ? 1.0 : 0.0;
    case 53:
      return a > b ? 1.0 : 0.0;
    case 54:
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
    case 1:
    case 19:
    case 20:
    case 21:
    case 27:
      return a;
    case 2:
      return wrap(0 - static_cast<uint64_t>(a));
    case 3:
      return a < 0 ? wrap(0 - static_cast<uint64_t>(a)) : a;
    case 13:
      return std::max<int64_t>(a, 0);
    case 17:
      return a == 0 ? 1 : 0;
    case 22:
      return (a > 0) - (a < 0);
    case 26:
      return 0;
    default:
      unknown(opcode, "one integer operand");
  }
}

int64_t binary_int(int opcode, int64_t a, int64_t b) {
  auto ua = static_cast<uint64_t>(a), ub = static_cast<uint64_t>(b);
  switch (opcode) {
    case 40:
      return wrap(ua + ub);
    case 41:
      return wrap(ua - ub);
    case 42:
      return wrap(ua * ub);
    case 44:
      return power(a, b);
    case 45:
      return std::min(a, b);
    case 46:
      return std::max(a, b);
    case 47:
      return floor_div(a, b);
    case 48:
      return wrap(ua - static_cast<uint64_t>(floor_div(a, b)) * ub);
    case 49:
      return a == b;
    case 50:
      return a != b;
    case 51:
      return a < b;
    case 52:
      return a <= b;
    case 53:
      return a > b;
    case 54:
      return a >= b;
    case 55:
      return a & b;
    case 56:
      return a | b;
    case 57:
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
  if (opcode == 70) return a != 0 ? b : c;
  if (opcode == 71) return a * b + c;
  return opcode >= 40 ? binary_float(opcode, a, b) : unary_float(opcode, a);
}

int64_t apply_int(int opcode, int64_t a, int64_t b, int64_t c) {
  if (opcode == 70) return a != 0 ? b : c;
  if (opcode == 71) {
    return wrap(static_cast<uint64_t>(a) * static_cast<uint64_t>(b) + static_cast<uint64_t>(c));
  }
  return opcode >= 40 ? binary_int(opcode, a, b) : unary_int(opcode, a);
}

}  // namespace rm::ops
