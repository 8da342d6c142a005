// The arithmetic of each opcode, for fp32 and fp64 values and for 64-bit integers. Comparisons and
// logical results are 0 or 1 in the type they were computed in. Integer division by zero gives 0.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "ewise/opcodes.hpp"

namespace rm::cuda_ops {

template <class F>
__device__ __forceinline__ F remainder_of(F a, F b) {
  const F r = fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}

/// torch's floor_divide: exact even where a / b rounds up to an integer.
template <class F>
__device__ __forceinline__ F floor_div_of(F a, F b) {
  if (b == 0) return a / b;
  const F r = fmod(a, b);
  F q = (a - r) / b;
  if (r != 0 && (b < 0) != (r < 0)) q -= 1;
  if (q == 0) return copysign(F(0), a / b);
  F f = floor(q);
  if (q - f > F(0.5)) f += 1;
  return f;
}

/// For divisors >= 1: two units of the last place in fp32, a third of the instructions of a / b.
__device__ __forceinline__ float quotient(float a, float b) { return __fdividef(a, b); }
__device__ __forceinline__ double quotient(double a, double b) { return a / b; }

__device__ __forceinline__ double gelu_of(double a) {
  return 0.5 * a * (1 + erf(a * 0.70710678118654752440));
}

/// a times the normal distribution's share below a: exp(-a^2 / 2) times a polynomial in
/// 1 / (1 + 0.34 |a|), fitted for equal relative error (2e-7). No branches; erff costs twice that.
__device__ __forceinline__ float gelu_of(float a) {
  float t, e;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(fabsf(a), 0.34f, 1.0f)));
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(a * a * -0.72134752044448f));
  float q = 0.045732103288f;
  q = fmaf(q, t, -0.204747989774f);
  q = fmaf(q, t, 0.272034257650f);
  q = fmaf(q, t, -0.0384770333767f);
  q = fmaf(q, t, 0.160684227943f);
  q = fmaf(q, t, 0.128629609942f);
  q = fmaf(q, t, 0.136144712567f);
  q *= t * e;
  return a * (a > 0 ? 1.0f - q : q);
}

template <int Op, class F>
__device__ __forceinline__ F apply1(F a) {
  if constexpr (Op == kCopy) return a;
  if constexpr (Op == kNeg) return -a;
  if constexpr (Op == kAbs) return fabs(a);
  if constexpr (Op == kExp) return exp(a);
  if constexpr (Op == kLog) return log(a);
  if constexpr (Op == kSqrt) return sqrt(a);
  if constexpr (Op == kRsqrt) return rsqrt(a);
  if constexpr (Op == kSin) return sin(a);
  if constexpr (Op == kCos) return cos(a);
  if constexpr (Op == kTanh) return tanh(a);
  if constexpr (Op == kErf) return erf(a);
  if constexpr (Op == kSigmoid) return quotient(F(1), F(1) + exp(-a));
  if constexpr (Op == kRelu) return a < 0 ? F(0) : a;
  if constexpr (Op == kGelu) return gelu_of(a);
  if constexpr (Op == kGeluTanh) {  // a sigmoid(2 u), u as in a / 2 (1 + tanh(u))
    return quotient(a, F(1) + exp(F(-1.5957691216057307117) * (a + F(0.044715) * a * a * a)));
  }
  if constexpr (Op == kSilu) return quotient(a, F(1) + exp(-a));
  if constexpr (Op == kLogicalNot) return a == 0 ? F(1) : F(0);
  if constexpr (Op == kReciprocal) return F(1) / a;
  if constexpr (Op == kFloor) return floor(a);
  if constexpr (Op == kCeil) return ceil(a);
  if constexpr (Op == kRound) return rint(a);
  if constexpr (Op == kSign) return a > 0 ? F(1) : a < 0 ? F(-1) : F(0);
  if constexpr (Op == kSoftplus) return a > 20 ? a : log1p(exp(a));
  if constexpr (Op == kLog1p) return log1p(a);
  if constexpr (Op == kExpm1) return expm1(a);
  if constexpr (Op == kIsNan) return a != a ? F(1) : F(0);
  if constexpr (Op == kTrunc) return trunc(a);
}

/// 16-bit results need less of gelu: 0.5 erfc as 2 to a polynomial, 3e-5 of the value; of bfloat16
/// 2^-12, below 2e-8 less.
template <class T>
__device__ __forceinline__ float gelu_half(float a) {
  const float b = fabsf(a);
  float e, q;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    e = fmaf(-0.000233251275f, b, 0.00486977366f);
    e = fmaf(e, b, -0.0445990144f);
    e = fmaf(e, b, -0.469681078f);
    e = fmaf(e, b, -1.14626082f);
    e = fmaf(e, b, -1.00035909f);
  } else {
    e = fmaf(-1.26245828e-06f, b, 4.820329162302443e-05f);
    e = fmaf(e, b, -0.0008072483010487554f);
    e = fmaf(e, b, 0.007944579294414972f);
    e = fmaf(e, b, -0.05263538412726607f);
    e = fmaf(e, b, -0.45995683171631796f);
    e = fmaf(e, b, -1.1506099355772355f);
    e = fmaf(e, b, -1.000043088883022f);
  }
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(q) : "f"(e));
  return a * (a > 0 ? 1.0f - q : q);
}

/// 1 / (1 + exp(-a)) to 16 bits and some.
__device__ __forceinline__ float sigmoid_half(float a) {
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(a * -1.44269504088896f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(e + 1.0f));
  return r;
}

/// tanh to 16 bits: 1 - 2 / (1 + exp(2a)), near 0 by its series.
__device__ __forceinline__ float tanh_half(float a) {
  const float far = fmaf(-2.0f, sigmoid_half(-2.0f * a), 1.0f);
  return fabsf(a) < 0.06f ? a * fmaf(a * a, -0.33333f, 1.0f) : far;
}

__device__ __forceinline__ float exp_half(float a) {
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(a * 1.44269504088896f));
  return e;
}

/// A unary opcode as exact as a result of type T can show.
template <int Op, class T>
__device__ __forceinline__ float apply_as(float a) {
  if constexpr (sizeof(T) == 4) {
    return apply1<Op>(a);
  } else if constexpr (Op == kGelu) {
    return gelu_half<T>(a);
  } else if constexpr (Op == kGeluTanh) {
    return a * sigmoid_half(1.5957691216057307f * (a + 0.044715f * a * a * a));
  } else if constexpr (Op == kSilu) {
    return a * sigmoid_half(a);
  } else if constexpr (Op == kSigmoid) {
    return sigmoid_half(a);
  } else if constexpr (Op == kTanh) {
    return tanh_half(a);
  } else if constexpr (Op == kExp) {
    return exp_half(a);
  } else {
    return apply1<Op>(a);
  }
}

template <int Op, class F>
__device__ __forceinline__ F apply2(F a, F b) {
  if constexpr (Op == kAdd) return a + b;
  if constexpr (Op == kSub) return a - b;
  if constexpr (Op == kMul) return a * b;
  if constexpr (Op == kDiv) return a / b;
  if constexpr (Op == kPow) return pow(a, b);
  if constexpr (Op == kMinimum) return a < b || a != a ? a : b;  // NaN wins
  if constexpr (Op == kMaximum) return a > b || a != a ? a : b;
  if constexpr (Op == kFloorDiv) return floor_div_of(a, b);
  if constexpr (Op == kRemainder) return remainder_of(a, b);
  if constexpr (Op == kEq) return a == b ? F(1) : F(0);
  if constexpr (Op == kNe) return a != b ? F(1) : F(0);
  if constexpr (Op == kLt) return a < b ? F(1) : F(0);
  if constexpr (Op == kLe) return a <= b ? F(1) : F(0);
  if constexpr (Op == kGt) return a > b ? F(1) : F(0);
  if constexpr (Op == kGe) return a >= b ? F(1) : F(0);
  if constexpr (Op == kAnd) return a != 0 && b != 0 ? F(1) : F(0);
  if constexpr (Op == kOr) return a != 0 || b != 0 ? F(1) : F(0);
  if constexpr (Op == kXor) return (a != 0) != (b != 0) ? F(1) : F(0);
}

template <int Op, class F>
__device__ __forceinline__ F apply3(F a, F b, F c) {
  if constexpr (Op == kWhere) return a != 0 ? b : c;
  if constexpr (Op == kFma) return a * b + c;
}

__device__ inline std::int64_t int_pow(std::int64_t base, std::int64_t exponent) {
  if (exponent < 0) return base == 1 ? 1 : base == -1 ? (exponent % 2 ? -1 : 1) : 0;
  std::uint64_t r = 1, x = static_cast<std::uint64_t>(base);
  for (; exponent; exponent >>= 1, x *= x) {
    if (exponent & 1) r *= x;
  }
  return static_cast<std::int64_t>(r);
}

/// Integers wrap; the unsigned detour avoids undefined behaviour.
__device__ inline std::int64_t apply_int(int op, std::int64_t a, std::int64_t b, std::int64_t c) {
  const auto ua = static_cast<std::uint64_t>(a), ub = static_cast<std::uint64_t>(b);
  switch (op) {
    case kNeg:
      return static_cast<std::int64_t>(0 - ua);
    case kAbs:
      return a < 0 ? static_cast<std::int64_t>(0 - ua) : a;
    case kRelu:
      return a < 0 ? 0 : a;
    case kLogicalNot:
      return a == 0;
    case kSign:
      return (a > 0) - (a < 0);
    case kIsNan:
      return 0;
    case kAdd:
      return static_cast<std::int64_t>(ua + ub);
    case kSub:
      return static_cast<std::int64_t>(ua - ub);
    case kMul:
      return static_cast<std::int64_t>(ua * ub);
    case kPow:
      return int_pow(a, b);
    case kMinimum:
      return a < b ? a : b;
    case kMaximum:
      return a > b ? a : b;
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
    case kWhere:
      return a != 0 ? b : c;
    case kFma:
      return static_cast<std::int64_t>(ua * ub + static_cast<std::uint64_t>(c));
    case kDiv:
    case kFloorDiv:
    case kRemainder: {
      if (b == 0) return 0;
      const std::int64_t q = b == -1 ? static_cast<std::int64_t>(0 - ua) : a / b;
      const std::int64_t r = b == -1 ? 0 : a % b;
      const bool adjust = r != 0 && (r < 0) != (b < 0);
      if (op == kRemainder) return adjust ? r + b : r;
      return op == kFloorDiv && adjust ? q - 1 : q;
    }
    default:
      return a;  // copy, floor, ceil, round, trunc
  }
}

/// legal_int and legal_float of api checks keep the opcodes below to those that have a meaning.
template <class F>
__device__ F apply_float(int op, F a, F b, F c) {
  switch (op) {
#define RM_CASE(id, ...) \
  case k##id:            \
    return apply1<k##id>(a);
    RM_EWISE_UNARY(RM_CASE)
#undef RM_CASE
#define RM_CASE(id, ...) \
  case k##id:            \
    return apply2<k##id>(a, b);
    RM_EWISE_BINARY(RM_CASE)
#undef RM_CASE
#define RM_CASE(id, ...) \
  case k##id:            \
    return apply3<k##id>(a, b, c);
    RM_EWISE_TERNARY(RM_CASE)
#undef RM_CASE
    default:
      return a;
  }
}

}  // namespace rm::cuda_ops
