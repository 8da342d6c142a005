// A program of class f32 over vectors of 8 elements. The last result stays in registers (the
// accumulator) and is worked on in place; only a result that is read again later goes to a slot in
// shared memory; operands are read where they are used. The inner axis of each operand is dense or
// broadcast.
#pragma once

#include "_shim/device_shim.cuh"
#include "ewise/kernels/ewise_args.hpp"
#include "ewise/kernels/ewise_math.cuh"

namespace rm::cuda_ops {

inline constexpr int kChainVec = 8, kChainThreads = 128;

template <class T>
__device__ __forceinline__ void chain_load(const EwiseOperand& o, std::int64_t at, bool dense,
                                           float (&out)[kChainVec]) {
  const T* p = static_cast<const T*>(o.data) + at;
  if (dense) {
    constexpr int V = sizeof(T) == 4 ? 4 : 8;
    float part[V];
#pragma unroll
    for (int h = 0; h < kChainVec / V; ++h) {
      load_vec(p + h * V, part);
#pragma unroll
      for (int j = 0; j < V; ++j) out[h * V + j] = part[j];
    }
  } else {
    const float x = to_float(*p);
#pragma unroll
    for (int j = 0; j < kChainVec; ++j) out[j] = x;
  }
}

/// Where a vector lies: its row (over all outer axes) and its first column.
struct ChainPlace {
  std::int64_t row, column;
};

__device__ __forceinline__ ChainPlace chain_place(const EwiseArgs& p, std::int64_t vector) {
  if (p.rank == 1) return {0, vector * kChainVec};
  if (p.row_magic) {  // below 2^31 elements: a multiplication instead of a division
    const auto v = static_cast<std::uint32_t>(vector);
    const std::uint32_t row = __umulhi(v, p.row_magic) >> p.row_shift;
    return {row, (v - row * p.row_vectors) * static_cast<std::uint32_t>(kChainVec)};
  }
  const std::int64_t per_row = p.shape[p.rank - 1] / kChainVec;
  const std::int64_t row = vector / per_row;
  return {row, (vector - row * per_row) * kChainVec};
}

__device__ __forceinline__ std::int64_t chain_offset(const EwiseArgs& p, const EwiseOperand& o,
                                                     ChainPlace place, bool dense) {
  const int inner = p.rank - 1;
  std::int64_t at = dense ? place.column : 0;
  if (inner == 0) return at;
#pragma unroll 1
  for (int d = inner - 1; d > 0; --d) {
    at += place.row % p.shape[d] * o.stride[d];
    place.row /= p.shape[d];
  }
  return at + place.row * o.stride[0];
}

__device__ __forceinline__ void chain_operand(const EwiseArgs& p, int index,
                                              const ChainPlace& place, float (&out)[kChainVec]) {
  const EwiseOperand& o = p.operand[index];
  const bool dense = o.stride[p.rank - 1] != 0;
  const std::int64_t at = chain_offset(p, o, place, dense);
  switch (o.dtype) {
    case DType::f32:
      return chain_load<float>(o, at, dense, out);
    case DType::bf16:
      return chain_load<__nv_bfloat16>(o, at, dense, out);
    case DType::f16:
      return chain_load<__half>(o, at, dense, out);
    default: {  // bool
      const auto* b = static_cast<const std::uint8_t*>(o.data) + at;
#pragma unroll
      for (int j = 0; j < kChainVec; ++j) out[j] = b[dense ? j : 0] != 0 ? 1.0f : 0.0f;
    }
  }
}

/// As words: a pack of eight 16-bit values is stored value by value here.
__device__ __forceinline__ void chain_store(const EwiseArgs& p, std::int64_t vector,
                                            const float (&v)[kChainVec]) {
  const std::int64_t at = vector * kChainVec;
  if (p.y_dtype == DType::f32) {
    auto* y = reinterpret_cast<float4*>(static_cast<float*>(p.y) + at);
    y[0] = float4{v[0], v[1], v[2], v[3]};
    y[1] = float4{v[4], v[5], v[6], v[7]};
    return;
  }
  std::uint32_t w[4];
  if (p.y_dtype == DType::bf16) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w[j]) : "f"(v[2 * j + 1]), "f"(v[2 * j]));
    }
  } else if (p.y_dtype == DType::f16) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w[j]) : "f"(v[2 * j + 1]), "f"(v[2 * j]));
    }
  } else {  // bool
    w[0] = w[1] = 0;
#pragma unroll
    for (int j = 0; j < kChainVec; ++j) w[j / 4] |= (v[j] != 0.0f ? 1u : 0u) << j % 4 * 8;
    *reinterpret_cast<uint2*>(static_cast<std::uint8_t*>(p.y) + at) = uint2{w[0], w[1]};
    return;
  }
  *reinterpret_cast<uint4*>(static_cast<std::uint16_t*>(p.y) + at) = uint4{w[0], w[1], w[2], w[3]};
}

/// acc = op(acc, b, c)
__device__ __forceinline__ void chain_apply(int op, float (&acc)[kChainVec],
                                            const float (&b)[kChainVec],
                                            const float (&c)[kChainVec]) {
  switch (op) {
#define RM_CASE(name)                                                                    \
  case name:                                                                             \
    _Pragma("unroll") for (int j = 0; j < kChainVec; ++j) acc[j] = apply1<name>(acc[j]); \
    break;
    RM_EWISE_UNARY(RM_CASE)
#undef RM_CASE
#define RM_CASE(name)                                                                          \
  case name:                                                                                   \
    _Pragma("unroll") for (int j = 0; j < kChainVec; ++j) acc[j] = apply2<name>(acc[j], b[j]); \
    break;
    RM_EWISE_BINARY(RM_CASE)
#undef RM_CASE
#define RM_CASE(name)                                              \
  case name:                                                       \
    _Pragma("unroll") for (int j = 0; j < kChainVec; ++j) acc[j] = \
        apply3<name>(acc[j], b[j], c[j]);                          \
    break;
    RM_EWISE_TERNARY(RM_CASE)
#undef RM_CASE
    default:
      break;
  }
}

/// Dynamic shared memory: slots x 8 x threads floats; a thread's own column, so no barrier.
__global__ void __launch_bounds__(kChainThreads, 8)
    ewise_chain(const __grid_constant__ EwiseArgs p) {
  extern __shared__ float columns[];
  float* slots = columns + threadIdx.x;
  const std::int64_t vectors = p.total / kChainVec;
  const std::int64_t grid = static_cast<std::int64_t>(gridDim.x) * kChainThreads;
  for (std::int64_t vector = blockIdx.x * static_cast<std::int64_t>(kChainThreads) + threadIdx.x;
       vector < vectors; vector += grid) {
    const ChainPlace place = chain_place(p, vector);
    float acc[kChainVec] = {};
    const auto fetch = [&](int from, float(&out)[kChainVec]) {  // from is not the accumulator
      if (from >= kFromSlot) {
#pragma unroll
        for (int j = 0; j < kChainVec; ++j) {
          out[j] = slots[((from - kFromSlot) * kChainVec + j) * kChainThreads];
        }
      } else {
        chain_operand(p, from, place, out);
      }
    };
    const auto take = [&](int from, float(&out)[kChainVec]) {
      if (from != kFromAcc) return fetch(from, out);
#pragma unroll
      for (int j = 0; j < kChainVec; ++j) out[j] = acc[j];
    };
#pragma unroll 1
    for (int k = 0; k < p.steps; ++k) {
      const EwiseStep& s = p.step[k];
      const int op = s.opcode;
      if (op == kConst) {
#pragma unroll
        for (int j = 0; j < kChainVec; ++j) acc[j] = s.imm;
      } else {
        float b[kChainVec] = {}, c[kChainVec] = {};
        if (op >= kWhere) take(s.c, c);
        if (op >= kAdd) take(s.b, b);
        if (s.a != kFromAcc) fetch(s.a, acc);
        chain_apply(op, acc, b, c);
      }
      if (s.dst >= 0) {
#pragma unroll
        for (int j = 0; j < kChainVec; ++j) {
          slots[(s.dst * kChainVec + j) * kChainThreads] = acc[j];
        }
      }
    }
    chain_store(p, vector, acc);
  }
}

}  // namespace rm::cuda_ops
