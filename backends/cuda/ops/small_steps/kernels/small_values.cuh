// Values of a program of small steps, and its instructions. The usual ones stand in a table, and the
// others are calls: what counts is how many instructions follow each other between two barriers.
#pragma once

#include "_shim/device_shim.cuh"
#include "ewise/kernels/ewise_registers.cuh"
#include "small_steps/kernels/small_steps_args.hpp"

namespace rm::cuda_ops {

/// A register; the program knows its class.
union SmallRegister {
  float f;
  double d;
  std::int64_t i;
  std::uint64_t bits;
};

static __device__ __noinline__ SmallRegister small_load_other(const char* data, DType dtype, int at) {
  const EwiseRegister from = ewise_load(data, dtype, at);
  SmallRegister out;
  out.bits = 0;
  if (dtype == DType::boolean) {
    out.f = static_cast<float>(from.i);
  } else if (from.cls == 0) {
    out.f = from.f;
  } else {
    out.i = from.i;  // or the bits of f64
  }
  return out;
}

__device__ __forceinline__ SmallRegister small_load(const char* data, DType dtype, int at) {
  SmallRegister out;
  out.bits = 0;
  if (dtype == DType::f32) {
    out.f = reinterpret_cast<const float*>(data)[at];
  } else if (dtype == DType::i64) {
    out.i = reinterpret_cast<const std::int64_t*>(data)[at];
  } else {
    out = small_load_other(data, dtype, at);
  }
  return out;
}

static __device__ __noinline__ void small_store_other(char* data, DType dtype, int at, SmallRegister r, int cls) {
  EwiseRegister from;
  from.cls = cls;
  from.i = r.i;
  if (cls == 0) from.f = r.f;
  ewise_store(data, dtype, at, from);
}

__device__ __forceinline__ void small_store(char* data, DType dtype, int at, SmallRegister r, int cls) {
  if (dtype == DType::f32 && cls == 0) {
    reinterpret_cast<float*>(data)[at] = r.f;
  } else {
    small_store_other(data, dtype, at, r, cls);
  }
}

template <class R>
__device__ __forceinline__ R small_as(SmallRegister r, int cls) {
  return cls == 0 ? static_cast<R>(r.f) : cls == 2 ? static_cast<R>(r.i) : static_cast<R>(r.d);
}

static __device__ __noinline__ SmallRegister small_other(const SmallStep& s, SmallRegister a, SmallRegister b,
                                                         SmallRegister c) {
  using I = std::int64_t;
  const int opcode = static_cast<int>(s.bits);
  SmallRegister out;
  out.bits = 0;
  if (s.cls == 0) {
    out.f = apply_float<float>(opcode, small_as<float>(a, s.of[0]), small_as<float>(b, s.of[1]), small_as<float>(c, s.of[2]));
  } else if (s.cls == 2) {
    out.i = apply_int(opcode, small_as<I>(a, s.of[0]), small_as<I>(b, s.of[1]), small_as<I>(c, s.of[2]));
    if (small_gives_bool(opcode, 2)) out.bits = __float_as_uint(out.i != 0 ? 1.0f : 0.0f);
  } else {
    out.d = apply_float<double>(opcode, small_as<double>(a, s.of[0]), small_as<double>(b, s.of[1]), small_as<double>(c, s.of[2]));
    if (small_gives_bool(opcode, 1)) out.bits = __float_as_uint(out.d != 0 ? 1.0f : 0.0f);
  }
  return out;
}

/// The value of an instruction.
__device__ __forceinline__ SmallRegister small_step(const SmallStep& s, SmallCode code, SmallRegister a,
                                                    SmallRegister b, SmallRegister c) {
  SmallRegister r = a;
  const auto truth = [](bool v) { return v ? 1.0f : 0.0f; };
  switch (code) {
    case SmallCode::add: r.f = a.f + b.f; break;
    case SmallCode::sub: r.f = a.f - b.f; break;
    case SmallCode::mul: r.f = a.f * b.f; break;
    case SmallCode::div: r.f = a.f / b.f; break;
    case SmallCode::neg: r.f = -a.f; break;
    case SmallCode::copy: break;
    case SmallCode::where: r.bits = a.f != 0 ? b.bits : c.bits; break;
    case SmallCode::eq: r.f = truth(a.f == b.f); break;
    case SmallCode::ne: r.f = truth(a.f != b.f); break;
    case SmallCode::lt: r.f = truth(a.f < b.f); break;
    case SmallCode::le: r.f = truth(a.f <= b.f); break;
    case SmallCode::gt: r.f = truth(a.f > b.f); break;
    case SmallCode::ge: r.f = truth(a.f >= b.f); break;
    case SmallCode::exp: r.f = exp(a.f); break;
    case SmallCode::log: r.f = log(a.f); break;
    case SmallCode::relu: r.f = a.f < 0 ? 0.0f : a.f; break;
    case SmallCode::maximum: r.f = a.f > b.f || a.f != a.f ? a.f : b.f; break;
    case SmallCode::minimum: r.f = a.f < b.f || a.f != a.f ? a.f : b.f; break;
    case SmallCode::fma: r.f = a.f * b.f + c.f; break;
    case SmallCode::constant: r.bits = s.bits; break;
    case SmallCode::whole_eq: r.f = truth(a.i == b.i); break;
    case SmallCode::whole_ne: r.f = truth(a.i != b.i); break;
    case SmallCode::whole_lt: r.f = truth(a.i < b.i); break;
    case SmallCode::whole_add: r.bits = a.bits + b.bits; break;
    default: r = small_other(s, a, b, c);
  }
  return r;
}

}  // namespace rm::cuda_ops
