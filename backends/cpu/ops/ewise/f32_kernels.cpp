// The f32 class of the ewise interpreter.  Simple functions are plain loops the compiler
// vectorises; transcendental ones use common/vec_math.hpp and
// common/vec_pow.hpp.
#include "common/vec_pow.hpp"
#include "common/vec_remainder.hpp"
#include "ops/ewise/isa_tables.hpp"
#include "ops/ewise/opcodes.hpp"

namespace rm::cpu::RM_ISA {
namespace {

// dst may be a source, element for element, which is what ivdep states.
#define RM_LOOP(name, expr)                                                            \
  void name(void* dst, const void* pa, const void* pb, const void* pc, int64_t n) {    \
    auto* d = static_cast<float*>(dst);                                                \
    const auto *x = static_cast<const float*>(pa), *y = static_cast<const float*>(pb), \
               *z = static_cast<const float*>(pc);                                     \
    (void)y, (void)z;                                                                  \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; ++i) {                             \
      const float a = x[i];                                                            \
      d[i] = (expr);                                                                   \
    }                                                                                  \
  }
#define RM_B y[i]
#define RM_C z[i]

#define RM_VECTOR(name, function)                                               \
  void name(void* dst, const void* pa, const void*, const void*, int64_t n) {   \
    auto* d = static_cast<float*>(dst);                                         \
    const auto* a = static_cast<const float*>(pa);                              \
    int64_t i = 0;                                                              \
    for (; i + kWidth <= n; i += kWidth) vstore(d + i, function(vload(a + i))); \
    if (i < n) vstore_part(d + i, function(vload_part(a + i, n - i)), n - i);   \
  }

#define RM_VECTOR2(name, function)                                                            \
  void name(void* dst, const void* pa, const void* pb, const void*, int64_t n) {              \
    auto* d = static_cast<float*>(dst);                                                       \
    const auto *a = static_cast<const float*>(pa), *b = static_cast<const float*>(pb);        \
    int64_t i = 0;                                                                            \
    for (; i + kWidth <= n; i += kWidth) vstore(d + i, function(vload(a + i), vload(b + i))); \
    if (i < n) {                                                                              \
      const vf x = vload_part(a + i, n - i, 1.0f), y = vload_part(b + i, n - i, 1.0f);        \
      vstore_part(d + i, function(x, y), n - i);                                              \
    }                                                                                         \
  }

RM_INLINE vf sin_of(vf x) { return vtrig(x, 0); }
RM_INLINE vf cos_of(vf x) { return vtrig(x, 1); }

RM_LOOP(neg, -a)
RM_LOOP(abs_, __builtin_fabsf(a))
RM_LOOP(sqrt_, __builtin_sqrtf(a))
RM_LOOP(rsqrt, 1.0f / __builtin_sqrtf(a))
RM_LOOP(relu, a < 0.0f ? 0.0f : a)
RM_LOOP(logical_not, a == 0.0f ? 1.0f : 0.0f)
RM_LOOP(reciprocal, 1.0f / a)
RM_LOOP(floor_, __builtin_floorf(a))
RM_LOOP(ceil_, __builtin_ceilf(a))
RM_LOOP(round_, __builtin_rintf(a))
RM_LOOP(trunc_, __builtin_truncf(a))
RM_LOOP(sign, a > 0.0f ? 1.0f : a < 0.0f ? -1.0f : 0.0f)  // NaN: 0, as in torch
RM_LOOP(is_nan, a != a ? 1.0f : 0.0f)
RM_LOOP(add, a + RM_B)
RM_LOOP(sub, a - RM_B)
RM_LOOP(mul, a* RM_B)
RM_LOOP(div_, a / RM_B)
RM_LOOP(minimum, a != a ? a : (RM_B < a || RM_B != RM_B) ? RM_B : a)
RM_LOOP(maximum, a != a ? a : (RM_B > a || RM_B != RM_B) ? RM_B : a)
RM_LOOP(eq, a == RM_B ? 1.0f : 0.0f)
RM_LOOP(ne, a != RM_B ? 1.0f : 0.0f)
RM_LOOP(lt, a < RM_B ? 1.0f : 0.0f)
RM_LOOP(le, a <= RM_B ? 1.0f : 0.0f)
RM_LOOP(gt, a > RM_B ? 1.0f : 0.0f)
RM_LOOP(ge, a >= RM_B ? 1.0f : 0.0f)
RM_LOOP(and_, (a != 0.0f) & (RM_B != 0.0f) ? 1.0f : 0.0f)
RM_LOOP(or_, (a != 0.0f) | (RM_B != 0.0f) ? 1.0f : 0.0f)
RM_LOOP(xor_, (a != 0.0f) != (RM_B != 0.0f) ? 1.0f : 0.0f)
RM_LOOP(where, a != 0.0f ? RM_B : RM_C)
RM_LOOP(fma_, __builtin_fmaf(a, RM_B, RM_C))

RM_VECTOR(exp_, vexp)
RM_VECTOR(log_, vlog)
RM_VECTOR(sin_, sin_of)
RM_VECTOR(cos_, cos_of)
RM_VECTOR(tanh_, vtanh)
RM_VECTOR(erf_, verf)
RM_VECTOR(sigmoid, vsigmoid)
RM_VECTOR(gelu, vgelu)
RM_VECTOR(gelu_slope, vgelu_slope)
RM_VECTOR(gelu_tanh, vgelu_tanh)
RM_VECTOR(silu, vsilu)
RM_VECTOR(softplus, vsoftplus)
RM_VECTOR(log1p_, vlog1p)
RM_VECTOR(expm1_, vexpm1)

RM_VECTOR2(pow_, vpow)
RM_VECTOR2(floor_div, vfloor_div)
RM_VECTOR2(remainder_, vremainder)

}  // namespace

EwiseFn find_gelu_slope() { return gelu_slope; }

EwiseFn find_f32(int opcode) {
  switch (opcode) {
    case kNeg:
      return neg;
    case kAbs:
      return abs_;
    case kExp:
      return exp_;
    case kLog:
      return log_;
    case kSqrt:
      return sqrt_;
    case kRsqrt:
      return rsqrt;
    case kSin:
      return sin_;
    case kCos:
      return cos_;
    case kTanh:
      return tanh_;
    case kErf:
      return erf_;
    case kSigmoid:
      return sigmoid;
    case kRelu:
      return relu;
    case kGelu:
      return gelu;
    case kGeluTanh:
      return gelu_tanh;
    case kSilu:
      return silu;
    case kLogicalNot:
      return logical_not;
    case kReciprocal:
      return reciprocal;
    case kFloor:
      return floor_;
    case kCeil:
      return ceil_;
    case kRound:
      return round_;
    case kSign:
      return sign;
    case kSoftplus:
      return softplus;
    case kLog1p:
      return log1p_;
    case kExpm1:
      return expm1_;
    case kIsNan:
      return is_nan;
    case kTrunc:
      return trunc_;
    case kAdd:
      return add;
    case kSub:
      return sub;
    case kMul:
      return mul;
    case kDiv:
      return div_;
    case kPow:
      return pow_;
    case kMinimum:
      return minimum;
    case kMaximum:
      return maximum;
    case kFloorDiv:
      return floor_div;
    case kRemainder:
      return remainder_;
    case kEq:
      return eq;
    case kNe:
      return ne;
    case kLt:
      return lt;
    case kLe:
      return le;
    case kGt:
      return gt;
    case kGe:
      return ge;
    case kAnd:
      return and_;
    case kOr:
      return or_;
    case kXor:
      return xor_;
    case kWhere:
      return where;
    case kFma:
      return fma_;
    default:
      return nullptr;
  }
}

}  // namespace rm::cpu::RM_ISA
