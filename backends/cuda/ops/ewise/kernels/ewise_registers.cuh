// Values of any class in registers of the interpreter: loads, stores and instructions. Each register holds
// its value in its own class; operands convert on use (C semantics).
#pragma once

#include "_shim/device_shim.cuh"
#include "ewise/kernels/ewise_args.hpp"
#include "ewise/kernels/ewise_math.cuh"

namespace rm::cuda_ops {

struct EwiseRegister {
  int cls;  // 0 f32, 1 f64, 2 i64
  union {
    float f;
    double d;
    std::int64_t i;
  };
  template <class R>
  __device__ R as() const {
    return cls == 0 ? static_cast<R>(f) : cls == 1 ? static_cast<R>(d) : static_cast<R>(i);
  }
};

__device__ inline EwiseRegister ewise_load(const void* p, DType t, std::int64_t i) {
  EwiseRegister r;
  r.cls = 2;
  switch (t) {
    case DType::f32:
      r.cls = 0;
      r.f = static_cast<const float*>(p)[i];
      break;
    case DType::f64:
      r.cls = 1;
      r.d = static_cast<const double*>(p)[i];
      break;
    case DType::bf16:
      r.cls = 0;
      r.f = to_float(static_cast<const __nv_bfloat16*>(p)[i]);
      break;
    case DType::f16:
      r.cls = 0;
      r.f = to_float(static_cast<const __half*>(p)[i]);
      break;
    case DType::i64:
      r.i = static_cast<const std::int64_t*>(p)[i];
      break;
    case DType::i32:
      r.i = static_cast<const std::int32_t*>(p)[i];
      break;
    case DType::i16:
      r.i = static_cast<const std::int16_t*>(p)[i];
      break;
    case DType::i8:
      r.i = static_cast<const std::int8_t*>(p)[i];
      break;
    default:
      r.i = static_cast<const std::uint8_t*>(p)[i];
      break;
  }
  return r;
}

__device__ inline void ewise_store(void* p, DType t, std::int64_t i, const EwiseRegister& r) {
  switch (t) {
    case DType::f32:
      static_cast<float*>(p)[i] = r.as<float>();
      break;
    case DType::f64:
      static_cast<double*>(p)[i] = r.as<double>();
      break;
    case DType::bf16:
      static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(r.as<float>());
      break;
    case DType::f16:
      static_cast<__half*>(p)[i] = __float2half_rn(r.as<float>());
      break;
    case DType::i64:
      static_cast<std::int64_t*>(p)[i] = r.as<std::int64_t>();
      break;
    case DType::i32:
      static_cast<std::int32_t*>(p)[i] = static_cast<std::int32_t>(r.as<std::int64_t>());
      break;
    case DType::i16:
      static_cast<std::int16_t*>(p)[i] = static_cast<std::int16_t>(r.as<std::int64_t>());
      break;
    case DType::i8:
      static_cast<std::int8_t*>(p)[i] = static_cast<std::int8_t>(r.as<std::int64_t>());
      break;
    case DType::u8:
      static_cast<std::uint8_t*>(p)[i] = static_cast<std::uint8_t>(r.as<std::int64_t>());
      break;
    default:
      static_cast<std::uint8_t*>(p)[i] = r.cls == 0 ? r.f != 0 : r.cls == 1 ? r.d != 0 : r.i != 0;
  }
}

__device__ inline EwiseRegister ewise_step(const EwiseStep& s, const EwiseRegister* regs) {
  EwiseRegister r;
  const EwiseRegister &a = regs[s.a], &b = regs[s.b < 0 ? s.a : s.b],
                      &c = regs[s.c < 0 ? s.a : s.c];
  const bool boolean = s.opcode == kLogicalNot || s.opcode == kIsNan ||
                       (s.opcode >= kEq && s.opcode <= kGe) || s.opcode >= kAnd && s.opcode <= kXor;
  r.cls = s.cls;
  if (s.cls == 0) {
    r.f = apply_float<float>(s.opcode, a.as<float>(), b.as<float>(), c.as<float>());
    if (boolean) r.i = r.f != 0, r.cls = 2;
  } else if (s.cls == 1) {
    r.d = apply_float<double>(s.opcode, a.as<double>(), b.as<double>(), c.as<double>());
    if (boolean) r.i = r.d != 0, r.cls = 2;
  } else {
    r.i = apply_int(s.opcode, a.as<std::int64_t>(), b.as<std::int64_t>(), c.as<std::int64_t>());
  }
  return r;
}

/// The value of an instruction, a constant or of registers before it.
__device__ inline EwiseRegister ewise_result(const EwiseStep& s, const double* imm, const EwiseRegister* regs) {
  if (s.opcode != kConst) return ewise_step(s, regs);
  EwiseRegister r;
  r.cls = s.cls;
  const double v = imm[s.a];
  if (s.cls == 0) r.f = static_cast<float>(v);
  if (s.cls == 1) r.d = v;
  if (s.cls == 2) r.i = static_cast<std::int64_t>(v);
  return r;
}

}  // namespace rm::cuda_ops
