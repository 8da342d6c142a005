// Chains whose every step takes the result of the step before and at most one operand, each operand
// read once: bias + activation + gate and their like. All operands of one float dtype and asked for
// before the first step; a step is chosen once for all vectors of a thread, not for each.
#pragma once

#include "_shim/row_shim.cuh"
#include "ewise/kernels/ewise_args.hpp"
#include "ewise/kernels/ewise_math.cuh"

namespace rm::cuda_ops {

inline constexpr int kFusedThreads = 256;

/// 16-bit results need less of gelu: 0.5 erfc as 2 to a polynomial, 3e-5 of the value.
__device__ __forceinline__ float gelu_half(float a) {
  const float b = fabsf(a);
  float e = -1.26245828e-06f, q;
  e = fmaf(e, b, 4.820329162302443e-05f);
  e = fmaf(e, b, -0.0008072483010487554f);
  e = fmaf(e, b, 0.007944579294414972f);
  e = fmaf(e, b, -0.05263538412726607f);
  e = fmaf(e, b, -0.45995683171631796f);
  e = fmaf(e, b, -1.1506099355772355f);
  e = fmaf(e, b, -1.000043088883022f);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(q) : "f"(e));
  return a * (a > 0 ? 1.0f - q : q);
}

template <int Op, class T>
__device__ __forceinline__ float fused_apply(float a) {
  if constexpr (Op == kGelu && sizeof(T) == 2) {
    return gelu_half(a);
  } else {
    return apply1<Op>(a);
  }
}

/// kUnroll: vectors of a thread and operand, in flight at once.
template <class T, int kOperands, int kUnroll>
__global__ void __launch_bounds__(kFusedThreads)
    ewise_fused(const __grid_constant__ EwiseFusedArgs p) {
  constexpr int V = kVec<T>;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * (kFusedThreads * kUnroll) + threadIdx.x;
  RowWords<T, kUnroll> in[kOperands];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kFusedThreads;
    if (i >= p.vectors) break;
#pragma unroll
    for (int o = 0; o < kOperands; ++o) {
      std::int64_t at = i;
      if (p.mode[o] == kFusedScalar) {
        at = 0;
      } else if (p.mode[o] == kFusedRow) {
        const auto v = static_cast<std::uint32_t>(i);
        at = v - (__umulhi(v, p.row_magic) >> p.row_shift) * p.row_vectors;
      }
      if (p.mode[o] == kFusedScalar) {
        std::uint32_t w;
        if constexpr (sizeof(T) == 4) {
          w = *static_cast<const std::uint32_t*>(p.x[o]);
        } else {
          w = *static_cast<const std::uint16_t*>(p.x[o]) * 0x10001u;
        }
        in[o].v[u] = uint4{w, w, w, w};
      } else {
        in[o].v[u] = static_cast<const uint4*>(p.x[o])[at];
      }
    }
  }
  float acc[kUnroll][V];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int j = 0; j < V; ++j) acc[u][j] = in[0].value(u, j);
  }
#pragma unroll 1
  for (int k = 0; k < p.steps; ++k) {
    const float imm = p.imm[k];
    switch (p.step[k]) {
#define RM_EACH(expression)                             \
  _Pragma("unroll") for (int u = 0; u < kUnroll; ++u) { \
    _Pragma("unroll") for (int j = 0; j < V; ++j) {     \
      const float a = acc[u][j];                        \
      acc[u][j] = (expression);                         \
    }                                                   \
  }                                                     \
  break;
#define RM_CASE(name) \
  case name:          \
    RM_EACH((fused_apply<name, T>(a)))
      RM_EWISE_FUSED_UNARY(RM_CASE)
#undef RM_CASE
#define RM_CASE(name)    \
  case kFusedImm + name: \
    RM_EACH(apply2<name>(a, imm))
      RM_EWISE_FUSED_BINARY(RM_CASE)
#undef RM_CASE
      default:
        break;
    }
    if constexpr (kOperands > 1) {
      const int op = p.step[k];
      if (op < kAdd || op >= kFusedImm) continue;
      switch (op) {
#define RM_CASE(name) \
  case name:          \
    RM_EACH(apply2<name>(a, in[1].value(u, j)))
        RM_EWISE_FUSED_BINARY(RM_CASE)
#undef RM_CASE
#undef RM_EACH
        default:
          break;
      }
      if constexpr (kOperands > 2) in[1] = in[2];  // operands in the order of their use
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * kFusedThreads;
    if (i >= p.vectors) break;
    store_words(static_cast<T*>(p.y) + i * V, acc[u]);
  }
}

}  // namespace rm::cuda_ops
