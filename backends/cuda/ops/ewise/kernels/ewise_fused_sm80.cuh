// Chains whose every step takes the result of the step before and at most one operand, each operand
// read once: bias + activation + gate and their like. All operands of one float dtype and asked for
// before the first step; a step is chosen once for all vectors of a thread, not for each.
#pragma once

#include "_shim/launch_shim.hpp"
#include "_shim/row_shim.cuh"
#include "ewise/kernels/ewise_args.hpp"
#include "ewise/kernels/ewise_math.cuh"

namespace rm::cuda_ops {

inline constexpr int kFusedThreads = 256;

/// kUnroll: vectors of a thread and operand, in flight at once. The compiler would take 60 to 80
/// registers to interleave values; blocks that fit beside each other hide more.
template <class T, int kOperands, int kUnroll, int kBlocks>
__global__ void __launch_bounds__(kFusedThreads, kBlocks)
    ewise_fused(const __grid_constant__ EwiseFusedArgs p) {
  constexpr int V = kVec<T>;
  const std::uint32_t first = blockIdx.x * (kFusedThreads * kUnroll) + threadIdx.x;
  const auto vectors = static_cast<std::uint32_t>(p.vectors);
  RowWords<T, kUnroll> in[kOperands];
  std::uint32_t single[kOperands] = {};
  overlap_begin(p.x[0], p.y);
#pragma unroll
  for (int o = 0; o < kOperands; ++o) {
    if (p.mode[o] != kFusedScalar) continue;
    if constexpr (sizeof(T) == 4) {
      single[o] = *static_cast<const std::uint32_t*>(p.x[o]);
    } else {
      single[o] = *static_cast<const std::uint16_t*>(p.x[o]);
    }
  }
  // nothing but loads here: a use of the first would make the others wait for it
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::uint32_t i = min(first + u * kFusedThreads, vectors - 1);
    const std::uint32_t column = i - (__umulhi(i, p.row_magic) >> p.row_shift) * p.row_vectors;
#pragma unroll
    for (int o = 0; o < kOperands; ++o) {
      if (p.mode[o] == kFusedScalar) continue;
      in[o].v[u] = static_cast<const uint4*>(p.x[o])[p.mode[o] == kFusedRow ? column : i];
    }
  }
#pragma unroll
  for (int o = 0; o < kOperands; ++o) {
    if (p.mode[o] != kFusedScalar) continue;
    const std::uint32_t w = sizeof(T) == 4 ? single[o] : single[o] * 0x10001u;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) in[o].v[u] = uint4{w, w, w, w};
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
    RM_EACH((apply_as<name, T>(a)))
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
    const std::uint32_t i = first + u * kFusedThreads;
    if (i >= vectors) break;
    store_words(static_cast<T*>(p.y) + static_cast<std::int64_t>(i) * V, acc[u]);
  }
}

}  // namespace rm::cuda_ops
