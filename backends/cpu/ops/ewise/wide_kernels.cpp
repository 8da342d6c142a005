// The f64 and i64 classes of the ewise interpreter: plain loops, libm for transcendental functions.
#include "common/vec.hpp"
#include "ops/ewise/isa_tables.hpp"
#include "ops/ewise/opcodes.hpp"

namespace rm::cpu::RM_ISA {
namespace {

// In, Out: element types of the sources and of the result; a, b, c: the operands of one element.
#define RM_LOOP(name, In, Out, arity, expr)                                         \
  void name(void* dst, const void* pa, const void* pb, const void* pc, int64_t n) { \
    auto* d = static_cast<Out*>(dst);                                               \
    const auto *x = static_cast<const In*>(pa), *y = static_cast<const In*>(pb),    \
               *z = static_cast<const In*>(pc);                                     \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; ++i) {                          \
      const In a = x[i], b = arity > 1 ? y[i] : In{}, c = arity > 2 ? z[i] : In{};  \
      (void)b, (void)c;                                                             \
      d[i] = static_cast<Out>(expr);                                                \
    }                                                                               \
  }
#define RM_F1(name, expr) RM_LOOP(f_##name, double, double, 1, expr)
#define RM_F2(name, expr) RM_LOOP(f_##name, double, double, 2, expr)
#define RM_FB(name, arity, expr) RM_LOOP(f_##name, double, int64_t, arity, expr)
#define RM_I1(name, expr) RM_LOOP(i_##name, int64_t, int64_t, 1, expr)
#define RM_I2(name, expr) RM_LOOP(i_##name, int64_t, int64_t, 2, expr)

RM_INLINE double remainder_of(double a, double b) {
  const double r = __builtin_fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
RM_INLINE double floor_div_of(double a, double b) {
  if (b == 0) return a / b;
  const double r = __builtin_fmod(a, b);
  double q = (a - r) / b;
  if (r != 0 && (b < 0) != (r < 0)) q -= 1.0;
  if (q == 0) return __builtin_copysign(0.0, a / b);
  double f = __builtin_floor(q);
  if (q - f > 0.5) f += 1.0;
  return f;
}
RM_INLINE double sigmoid_of(double a) { return 1.0 / (1.0 + __builtin_exp(-a)); }
RM_INLINE double gelu_tanh_of(double a) {
  return 0.5 * a * (1.0 + __builtin_tanh(0.79788456080286535588 * (a + 0.044715 * a * a * a)));
}

RM_F1(neg, -a)
RM_F1(abs, __builtin_fabs(a))
RM_F1(exp, __builtin_exp(a))
RM_F1(log, __builtin_log(a))
RM_F1(sqrt, __builtin_sqrt(a))
RM_F1(rsqrt, 1.0 / __builtin_sqrt(a))
RM_F1(sin, __builtin_sin(a))
RM_F1(cos, __builtin_cos(a))
RM_F1(tanh, __builtin_tanh(a))
RM_F1(erf, __builtin_erf(a))
RM_F1(sigmoid, sigmoid_of(a))
RM_F1(relu, a < 0 ? 0.0 : a)
RM_F1(gelu, 0.5 * a * (1.0 + __builtin_erf(a * 0.70710678118654752440)))
RM_F1(gelu_tanh, gelu_tanh_of(a))
RM_F1(silu, a / (1.0 + __builtin_exp(-a)))
RM_F1(reciprocal, 1.0 / a)
RM_F1(floor, __builtin_floor(a))
RM_F1(ceil, __builtin_ceil(a))
RM_F1(round, __builtin_rint(a))
RM_F1(trunc, __builtin_trunc(a))
RM_F1(sign, a > 0 ? 1.0 : a < 0 ? -1.0 : 0.0)
RM_F1(softplus, a > 20.0 ? a : __builtin_log1p(__builtin_exp(a)))
RM_F1(log1p, __builtin_log1p(a))
RM_F1(expm1, __builtin_expm1(a))
RM_F2(add, a + b)
RM_F2(sub, a - b)
RM_F2(mul, a* b)
RM_F2(div, a / b)
RM_F2(pow, __builtin_pow(a, b))
RM_F2(minimum, a != a ? a : (b < a || b != b) ? b : a)
RM_F2(maximum, a != a ? a : (b > a || b != b) ? b : a)
RM_F2(floor_div, floor_div_of(a, b))
RM_F2(remainder, remainder_of(a, b))
RM_LOOP(f_where, double, double, 3, a != 0 ? b : c)
RM_LOOP(f_fma, double, double, 3, __builtin_fma(a, b, c))
RM_FB(logical_not, 1, a == 0)
RM_FB(isnan, 1, a != a)
RM_FB(eq, 2, a == b)
RM_FB(ne, 2, a != b)
RM_FB(lt, 2, a < b)
RM_FB(le, 2, a <= b)
RM_FB(gt, 2, a > b)
RM_FB(ge, 2, a >= b)
RM_FB(and, 2, (a != 0) & (b != 0))
RM_FB(or, 2, (a != 0) | (b != 0))
RM_FB(xor, 2, (a != 0) != (b != 0))

// Integer arithmetic wraps, as in torch: the unsigned detour avoids undefined behaviour.
RM_INLINE int64_t wrap_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
RM_INLINE int64_t wrap_sub(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
RM_INLINE int64_t wrap_mul(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
// INT64_MIN / -1 traps in hardware; it wraps here.
RM_INLINE int64_t quotient(int64_t a, int64_t b) { return b == -1 ? wrap_sub(0, a) : a / b; }
RM_INLINE int64_t modulo(int64_t a, int64_t b) { return b == -1 ? 0 : a % b; }
int64_t int_pow(int64_t base, int64_t exponent) {
  if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent % 2 ? -1 : 1) : 0;
  int64_t r = 1;
  for (; exponent; exponent >>= 1, base = wrap_mul(base, base)) {
    if (exponent & 1) r = wrap_mul(r, base);
  }
  return r;
}

RM_I1(neg, wrap_sub(0, a))
RM_I1(abs, a < 0 ? wrap_sub(0, a) : a)
RM_I1(relu, a < 0 ? 0 : a)
RM_I1(logical_not, a == 0)
RM_I1(same, a)
RM_I1(sign, (a > 0) - (a < 0))
RM_I1(isnan, 0 * (a != 0))
RM_I2(add, wrap_add(a, b))
RM_I2(sub, wrap_sub(a, b))
RM_I2(mul, wrap_mul(a, b))
RM_I2(pow, int_pow(a, b))
RM_I2(minimum, a < b ? a : b)
RM_I2(maximum, a > b ? a : b)
RM_I2(eq, a == b)
RM_I2(ne, a != b)
RM_I2(lt, a < b)
RM_I2(le, a <= b)
RM_I2(gt, a > b)
RM_I2(ge, a >= b)
RM_I2(and, a& b)
RM_I2(or, a | b)
RM_I2(xor, a ^ b)
RM_LOOP(i_where, int64_t, int64_t, 3, a != 0 ? b : c)
RM_LOOP(i_fma, int64_t, int64_t, 3, wrap_add(wrap_mul(a, b), c))

enum class Division { trunc, floor, remainder };
template <Division kKind>
void divide(void* dst, const void* pa, const void* pb, const void* flag, int64_t n) {
  auto* d = static_cast<int64_t*>(dst);
  const auto *x = static_cast<const int64_t*>(pa), *y = static_cast<const int64_t*>(pb);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t a = x[i], b = y[i];
    if (b == 0) {
      *static_cast<int*>(const_cast<void*>(flag)) = 1;
      d[i] = 0;
      continue;
    }
    const int64_t q = quotient(a, b), r = modulo(a, b);
    const bool adjust = r != 0 && (r < 0) != (b < 0);
    d[i] = kKind == Division::trunc   ? q
           : kKind == Division::floor ? q - adjust
           : adjust                   ? r + b
                                      : r;
  }
}

/// Functions of reals on integers: through f64.
template <int kOpcode>
void through_f64(void* dst, const void* pa, const void*, const void*, int64_t n) {
  auto* d = static_cast<int64_t*>(dst);
  const auto* x = static_cast<const int64_t*>(pa);
  const EwiseFn fn = find_f64(kOpcode);
  for (int64_t i = 0; i < n; ++i) {
    double value = static_cast<double>(x[i]);
    fn(&value, &value, nullptr, nullptr, 1);
    d[i] = static_cast<int64_t>(value);
  }
}

}  // namespace

#define RM_CASE(opcode, fn) \
  case opcode:              \
    return fn

EwiseFn find_f64(int opcode) {
  switch (opcode) {
    RM_CASE(kNeg, f_neg);
    RM_CASE(kAbs, f_abs);
    RM_CASE(kExp, f_exp);
    RM_CASE(kLog, f_log);
    RM_CASE(kSqrt, f_sqrt);
    RM_CASE(kRsqrt, f_rsqrt);
    RM_CASE(kSin, f_sin);
    RM_CASE(kCos, f_cos);
    RM_CASE(kTanh, f_tanh);
    RM_CASE(kErf, f_erf);
    RM_CASE(kSigmoid, f_sigmoid);
    RM_CASE(kRelu, f_relu);
    RM_CASE(kGelu, f_gelu);
    RM_CASE(kGeluTanh, f_gelu_tanh);
    RM_CASE(kSilu, f_silu);
    RM_CASE(kLogicalNot, f_logical_not);
    RM_CASE(kReciprocal, f_reciprocal);
    RM_CASE(kFloor, f_floor);
    RM_CASE(kCeil, f_ceil);
    RM_CASE(kRound, f_round);
    RM_CASE(kSign, f_sign);
    RM_CASE(kSoftplus, f_softplus);
    RM_CASE(kLog1p, f_log1p);
    RM_CASE(kExpm1, f_expm1);
    RM_CASE(kIsNan, f_isnan);
    RM_CASE(kTrunc, f_trunc);
    RM_CASE(kAdd, f_add);
    RM_CASE(kSub, f_sub);
    RM_CASE(kMul, f_mul);
    RM_CASE(kDiv, f_div);
    RM_CASE(kPow, f_pow);
    RM_CASE(kMinimum, f_minimum);
    RM_CASE(kMaximum, f_maximum);
    RM_CASE(kFloorDiv, f_floor_div);
    RM_CASE(kRemainder, f_remainder);
    RM_CASE(kEq, f_eq);
    RM_CASE(kNe, f_ne);
    RM_CASE(kLt, f_lt);
    RM_CASE(kLe, f_le);
    RM_CASE(kGt, f_gt);
    RM_CASE(kGe, f_ge);
    RM_CASE(kAnd, f_and);
    RM_CASE(kOr, f_or);
    RM_CASE(kXor, f_xor);
    RM_CASE(kWhere, f_where);
    RM_CASE(kFma, f_fma);
    default:
      return nullptr;
  }
}

EwiseFn find_i64(int opcode) {
  switch (opcode) {
    RM_CASE(kNeg, i_neg);
    RM_CASE(kAbs, i_abs);
    RM_CASE(kRelu, i_relu);
    RM_CASE(kLogicalNot, i_logical_not);
    RM_CASE(kFloor, i_same);
    RM_CASE(kCeil, i_same);
    RM_CASE(kRound, i_same);
    RM_CASE(kTrunc, i_same);
    RM_CASE(kSign, i_sign);
    RM_CASE(kIsNan, i_isnan);
    RM_CASE(kAdd, i_add);
    RM_CASE(kSub, i_sub);
    RM_CASE(kMul, i_mul);
    RM_CASE(kDiv, divide<Division::trunc>);
    RM_CASE(kPow, i_pow);
    RM_CASE(kMinimum, i_minimum);
    RM_CASE(kMaximum, i_maximum);
    RM_CASE(kFloorDiv, divide<Division::floor>);
    RM_CASE(kRemainder, divide<Division::remainder>);
    RM_CASE(kEq, i_eq);
    RM_CASE(kNe, i_ne);
    RM_CASE(kLt, i_lt);
    RM_CASE(kLe, i_le);
    RM_CASE(kGt, i_gt);
    RM_CASE(kGe, i_ge);
    RM_CASE(kAnd, i_and);
    RM_CASE(kOr, i_or);
    RM_CASE(kXor, i_xor);
    RM_CASE(kWhere, i_where);
    RM_CASE(kFma, i_fma);
    RM_CASE(kExp, through_f64<kExp>);
    RM_CASE(kLog, through_f64<kLog>);
    RM_CASE(kSqrt, through_f64<kSqrt>);
    RM_CASE(kRsqrt, through_f64<kRsqrt>);
    RM_CASE(kSin, through_f64<kSin>);
    RM_CASE(kCos, through_f64<kCos>);
    RM_CASE(kTanh, through_f64<kTanh>);
    RM_CASE(kErf, through_f64<kErf>);
    RM_CASE(kSigmoid, through_f64<kSigmoid>);
    RM_CASE(kGelu, through_f64<kGelu>);
    RM_CASE(kGeluTanh, through_f64<kGeluTanh>);
    RM_CASE(kSilu, through_f64<kSilu>);
    RM_CASE(kReciprocal, through_f64<kReciprocal>);
    RM_CASE(kSoftplus, through_f64<kSoftplus>);
    RM_CASE(kLog1p, through_f64<kLog1p>);
    RM_CASE(kExpm1, through_f64<kExpm1>);
    default:
      return nullptr;
  }
}

}  // namespace rm::cpu::RM_ISA
