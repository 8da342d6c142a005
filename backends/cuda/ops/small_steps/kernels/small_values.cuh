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
  if (from.cls == 0) {
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
  } else if (dtype == DType::boolean) {
    out.f = data[at] != 0 ? 1.0f : 0.0f;
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
  } else if (dtype == DType::boolean && cls == 0) {
    data[at] = r.f != 0 ? 1 : 0;
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

/// The values of an instruction for kWide elements, which is read and looked up once for all of them.
template <int kWide>
__device__ __forceinline__ void small_step(const SmallStep& s, SmallCode code, const SmallRegister (&a)[kWide],
                                           const SmallRegister (&b)[kWide], const SmallRegister (&c)[kWide],
                                           SmallRegister (&out)[kWide]) {
  const auto truth = [](bool v) { return v ? 1.0f : 0.0f; };
  const auto each = [&](auto&& value) {
#pragma unroll
    for (int w = 0; w < kWide; ++w) {
      out[w] = a[w];
      value(out[w], b[w], c[w]);
    }
  };
  using R = SmallRegister;
  switch (code) {
    case SmallCode::add: each([](R& x, const R& y, const R&) { x.f += y.f; }); break;
    case SmallCode::sub: each([](R& x, const R& y, const R&) { x.f -= y.f; }); break;
    case SmallCode::mul: each([](R& x, const R& y, const R&) { x.f *= y.f; }); break;
    case SmallCode::div: each([](R& x, const R& y, const R&) { x.f /= y.f; }); break;
    case SmallCode::neg: each([](R& x, const R&, const R&) { x.f = -x.f; }); break;
    case SmallCode::copy: each([](R&, const R&, const R&) {}); break;
    case SmallCode::where: each([](R& x, const R& y, const R& z) { x.bits = x.f != 0 ? y.bits : z.bits; }); break;
    case SmallCode::eq: each([&](R& x, const R& y, const R&) { x.f = truth(x.f == y.f); }); break;
    case SmallCode::ne: each([&](R& x, const R& y, const R&) { x.f = truth(x.f != y.f); }); break;
    case SmallCode::lt: each([&](R& x, const R& y, const R&) { x.f = truth(x.f < y.f); }); break;
    case SmallCode::le: each([&](R& x, const R& y, const R&) { x.f = truth(x.f <= y.f); }); break;
    case SmallCode::gt: each([&](R& x, const R& y, const R&) { x.f = truth(x.f > y.f); }); break;
    case SmallCode::ge: each([&](R& x, const R& y, const R&) { x.f = truth(x.f >= y.f); }); break;
    case SmallCode::exp: each([](R& x, const R&, const R&) { x.f = exp(x.f); }); break;
    case SmallCode::log: each([](R& x, const R&, const R&) { x.f = log(x.f); }); break;
    case SmallCode::relu: each([](R& x, const R&, const R&) { x.f = x.f < 0 ? 0.0f : x.f; }); break;
    case SmallCode::maximum: each([](R& x, const R& y, const R&) { x.f = x.f > y.f || x.f != x.f ? x.f : y.f; }); break;
    case SmallCode::minimum: each([](R& x, const R& y, const R&) { x.f = x.f < y.f || x.f != x.f ? x.f : y.f; }); break;
    case SmallCode::fma: each([](R& x, const R& y, const R& z) { x.f = x.f * y.f + z.f; }); break;
    case SmallCode::constant: each([&](R& x, const R&, const R&) { x.bits = s.bits; }); break;
    case SmallCode::both: each([&](R& x, const R& y, const R&) { x.f = truth(x.f != 0 && y.f != 0); }); break;
    case SmallCode::either: each([&](R& x, const R& y, const R&) { x.f = truth(x.f != 0 || y.f != 0); }); break;
    case SmallCode::negated: each([&](R& x, const R&, const R&) { x.f = truth(x.f == 0); }); break;
    case SmallCode::whole_eq: each([&](R& x, const R& y, const R&) { x.f = truth(x.i == y.i); }); break;
    case SmallCode::whole_ne: each([&](R& x, const R& y, const R&) { x.f = truth(x.i != y.i); }); break;
    case SmallCode::whole_lt: each([&](R& x, const R& y, const R&) { x.f = truth(x.i < y.i); }); break;
    case SmallCode::whole_le: each([&](R& x, const R& y, const R&) { x.f = truth(x.i <= y.i); }); break;
    case SmallCode::whole_gt: each([&](R& x, const R& y, const R&) { x.f = truth(x.i > y.i); }); break;
    case SmallCode::whole_ge: each([&](R& x, const R& y, const R&) { x.f = truth(x.i >= y.i); }); break;
    case SmallCode::whole_add: each([](R& x, const R& y, const R&) { x.bits += y.bits; }); break;
    case SmallCode::whole_sub: each([](R& x, const R& y, const R&) { x.bits -= y.bits; }); break;
    default: each([&](R& x, const R& y, const R& z) { x = small_other(s, x, y, z); });
  }
}

}  // namespace rm::cuda_ops
