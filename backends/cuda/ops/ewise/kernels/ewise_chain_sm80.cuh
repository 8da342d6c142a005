// A program of class f32 over 16 values a thread. All operands are asked for before the first step
// and wait in a thread's own column of shared memory, so no barrier; the last result stays in
// registers and is worked on in place, only one that is read again later goes to a column. A step
// is chosen once for all values of a thread. The inner axis of each operand is dense or broadcast.
#pragma once

#include "_shim/launch_shim.hpp"
#include "ewise/kernels/ewise_column_sm80.cuh"
#include "ewise/kernels/ewise_math.cuh"

namespace rm::cuda_ops {

/// Long functions, value by value: their code exists once.
__device__ __forceinline__ void chain_rare(const EwiseChainArgs& p, const ChainColumn& column,
                                           int opcode, float (&acc)[kChainValues],
                                           const float (&b)[kChainValues]) {
  const int other = p.scratch + kChainValues / 4;
  column.keep(p.scratch, acc);
  if (opcode >= kAdd) column.keep(other, b);
#pragma unroll 1
  for (int j = 0; j < kChainValues; ++j) {
    const float a = __uint_as_float(column.load4(column.value(p.scratch, j)));
    const float c = opcode >= kAdd ? __uint_as_float(column.load4(column.value(other, j))) : 0.0f;
    float out = a;
    switch (opcode) {
#define RM_CASE(name)      \
  case name:               \
    out = apply1<name>(a); \
    break;
      RM_EWISE_RARE_UNARY(RM_CASE)
#undef RM_CASE
#define RM_CASE(name)         \
  case name:                  \
    out = apply2<name>(a, c); \
    break;
      RM_EWISE_RARE_BINARY(RM_CASE)
#undef RM_CASE
      default:
        break;
    }
    column.store4(column.value(p.scratch, j), out);
  }
#pragma unroll
  for (int j = 0; j < kChainValues; ++j) {
    acc[j] = __uint_as_float(column.load4(column.value(p.scratch, j)));
  }
}

/// acc = op(acc, b, c), in place. 16-bit results (V 8) need less of some functions.
template <int V>
__device__ __forceinline__ void chain_apply(const EwiseChainArgs& p, const ChainColumn& column,
                                            const EwiseChainStep& s, float (&acc)[kChainValues],
                                            const float (&b)[kChainValues]) {
  using T = std::conditional_t<V == 8, __half, float>;
  const int op = s.op;
  switch (op) {
#define RM_EACH(expression)                                  \
  _Pragma("unroll") for (int j = 0; j < kChainValues; ++j) { \
    const float a = acc[j];                                  \
    acc[j] = (expression);                                   \
  }
    case kChainAddImm:
      RM_EACH(a + s.imm)
      break;
    case kChainMulImm:
      RM_EACH(a * s.imm)
      break;
    case kChainSquare:
      RM_EACH(a * a)
      break;
#define RM_CASE(name)               \
  case kChain_##name:               \
    RM_EACH((apply_as<name, T>(a))) \
    break;
      RM_EWISE_CHAIN_UNARY(RM_CASE)
#undef RM_CASE
#define RM_CASE(name)              \
  case kChain_##name:              \
    RM_EACH(apply2<name>(a, b[j])) \
    break;
      RM_EWISE_CHAIN_BINARY(RM_CASE)
#undef RM_CASE
    case kChainWhere:
    case kChainWhereTrue:
    case kChainWhereFalse:
    case kChainFma: {
      float c[kChainValues];
      const float imm = s.from[2] == kFromImm ? p.imm[s.place[2]] : 0.0f;
      chain_fetch<V>(column, s.from[2], s.place[2], imm, c);
      if (op == kChainFma) {
        RM_EACH(apply3<kFma>(a, b[j], c[j]))
      } else if (op == kChainWhere) {
        RM_EACH(a != 0 ? b[j] : c[j])
      } else if (op == kChainWhereTrue) {
        RM_EACH(b[j] != 0 ? a : c[j])
      } else {
        RM_EACH(b[j] != 0 ? c[j] : a)
      }
      break;
    }
    default:
      chain_rare(p, column, s.place[2], acc, b);
  }
#undef RM_EACH
}

template <int V>
__device__ __forceinline__ void chain_store(const EwiseChainArgs& p, std::uint32_t v,
                                            const float (&x)[V]) {
  const std::int64_t at = static_cast<std::int64_t>(v) * V;
  if constexpr (V == 4) {
    if (p.y_kind == kFromF32) {
      *reinterpret_cast<float4*>(static_cast<float*>(p.y) + at) = float4{x[0], x[1], x[2], x[3]};
      return;
    }
  }
  std::uint32_t w[V / 2];
  if (p.y_kind == kFromBool) {
#pragma unroll
    for (int i = 0; i < V / 4; ++i) {
      w[i] = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) w[i] |= (x[4 * i + j] != 0.0f ? 1u : 0u) << j * 8;
    }
    memcpy(static_cast<unsigned char*>(p.y) + at, w, V);
    return;
  }
#pragma unroll
  for (int i = 0; i < V / 2; ++i) {
    w[i] = p.y_kind == kFromF16 ? pack_pair<__half>(x[2 * i], x[2 * i + 1])
                                : pack_pair<__nv_bfloat16>(x[2 * i], x[2 * i + 1]);
  }
  auto* y = static_cast<std::uint16_t*>(p.y) + at;
  if constexpr (V == 8) {
    *reinterpret_cast<uint4*>(y) = uint4{w[0], w[1], w[2], w[3]};
  } else {
    *reinterpret_cast<uint2*>(y) = uint2{w[0], w[1]};
  }
}

/// V elements are 16 bytes of the widest operand: 8 where all are of 16 bits or bool, else 4.
template <int V>
__global__ void __launch_bounds__(kChainThreads, 8)
    ewise_chain(const __grid_constant__ EwiseChainArgs p) {
  extern __shared__ __align__(16) unsigned char shared[];
  const ChainColumn column{shared_address(shared)};
  const std::uint32_t first = blockIdx.x * (kChainThreads * (kChainValues / V)) + threadIdx.x;
  EwiseChainStep next = p.step[0];
  const ChainPlaces<V> places(p, first);
  overlap_begin(p.y);
#pragma unroll 1
  for (int o = 0; o < p.operands; ++o) chain_stage<V>(p, p.operand[o], column, places);
  copy_group_end();
  copy_groups_wait<0>();
  float acc[kChainValues] = {}, b[kChainValues];
#pragma unroll 1
  for (int k = 0; k < p.steps; ++k) {
    const EwiseChainStep s = next;
    next = p.step[k + 1];
    if (s.op >= kChainBinary) chain_fetch<V>(column, s.from[1], s.place[1], s.imm, b);
    if (s.from[0] != kFromAcc) {
      const float imm = s.from[0] == kFromImm ? p.imm[s.place[0]] : 0.0f;
      chain_fetch<V>(column, s.from[0], s.place[0], imm, acc);
    }
    chain_apply<V>(p, column, s, acc, b);
#pragma unroll
    for (int j = 0; j < kChainValues; ++j) asm volatile("" : "+f"(acc[j]));  // one register each
    if (s.keep != kChainNotKept) column.keep(s.keep, acc);
  }
#pragma unroll
  for (int u = 0; u < kChainValues / V; ++u) {
    const std::uint32_t v = first + u * kChainThreads;
    if (v >= p.vectors) return;
    float x[V];
#pragma unroll
    for (int j = 0; j < V; ++j) x[j] = acc[u * V + j];
    chain_store<V>(p, v, x);
  }
}

}  // namespace rm::cuda_ops
