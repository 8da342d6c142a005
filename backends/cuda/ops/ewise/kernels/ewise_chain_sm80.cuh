// A program of class f32 over vectors of 8 elements. The last result stays in registers (the
// accumulator); only a result that is read again later goes to a slot in shared memory; operands
// are read where they are used. The inner axis of each operand is dense or broadcast.
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
  const std::int64_t per_row = p.shape[p.rank - 1] / kChainVec;
  std::int64_t row;
  if (p.total <= 0x7fffffff) {  // 32-bit division is several times cheaper
    row = static_cast<std::uint32_t>(vector) / static_cast<std::uint32_t>(per_row);
  } else {
    row = vector / per_row;
  }
  return {row, (vector - row * per_row) * kChainVec};
}

__device__ __forceinline__ std::int64_t chain_offset(const EwiseArgs& p, const EwiseOperand& o,
                                                     ChainPlace place) {
  const int inner = p.rank - 1;
  std::int64_t at = place.column * o.stride[inner];
  if (inner == 0) return at;
  for (int d = inner - 1; d > 0; --d) {
    at += place.row % p.shape[d] * o.stride[d];
    place.row /= p.shape[d];
  }
  return at + place.row * o.stride[0];
}

__device__ __forceinline__ void chain_operand(const EwiseArgs& p, int index,
                                              const ChainPlace& place, float (&out)[kChainVec]) {
  const EwiseOperand& o = p.operand[index];
  const int inner = p.rank - 1;
  const std::int64_t at = chain_offset(p, o, place);
  const bool dense = o.stride[inner] != 0;
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

__device__ __forceinline__ void chain_store(const EwiseArgs& p, std::int64_t vector,
                                            const float (&v)[kChainVec]) {
  const std::int64_t at = vector * kChainVec;
  switch (p.y_dtype) {
    case DType::f32: {
      float lo[4] = {v[0], v[1], v[2], v[3]}, hi[4] = {v[4], v[5], v[6], v[7]};
      store_vec(static_cast<float*>(p.y) + at, lo);
      return store_vec(static_cast<float*>(p.y) + at + 4, hi);
    }
    case DType::bf16:
      return store_vec(static_cast<__nv_bfloat16*>(p.y) + at, v);
    case DType::f16:
      return store_vec(static_cast<__half*>(p.y) + at, v);
    default: {  // bool
      Pack<std::uint8_t, kChainVec> out;
#pragma unroll
      for (int j = 0; j < kChainVec; ++j) out.v[j] = v[j] != 0.0f;
      *reinterpret_cast<Pack<std::uint8_t, kChainVec>*>(static_cast<std::uint8_t*>(p.y) + at) = out;
    }
  }
}

__device__ __forceinline__ void chain_apply(int op, float (&r)[kChainVec],
                                            const float (&a)[kChainVec],
                                            const float (&b)[kChainVec],
                                            const float (&c)[kChainVec]) {
  switch (op) {
#define RM_CASE(name)                                                                \
  case name:                                                                         \
    _Pragma("unroll") for (int j = 0; j < kChainVec; ++j) r[j] = apply1<name>(a[j]); \
    break;
    RM_EWISE_UNARY(RM_CASE)
#undef RM_CASE
#define RM_CASE(name)                                                                      \
  case name:                                                                               \
    _Pragma("unroll") for (int j = 0; j < kChainVec; ++j) r[j] = apply2<name>(a[j], b[j]); \
    break;
    RM_EWISE_BINARY(RM_CASE)
#undef RM_CASE
#define RM_CASE(name)                                                                            \
  case name:                                                                                     \
    _Pragma("unroll") for (int j = 0; j < kChainVec; ++j) r[j] = apply3<name>(a[j], b[j], c[j]); \
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
  extern __shared__ float slots[];
  const std::int64_t vectors = p.total / kChainVec;
  const std::int64_t grid = static_cast<std::int64_t>(gridDim.x) * kChainThreads;
  for (std::int64_t vector = blockIdx.x * static_cast<std::int64_t>(kChainThreads) + threadIdx.x;
       vector < vectors; vector += grid) {
    const ChainPlace place = chain_place(p, vector);
    float acc[kChainVec] = {};
    const auto fetch = [&](int from, float(&out)[kChainVec]) {
      if (from == kFromAcc) {
#pragma unroll
        for (int j = 0; j < kChainVec; ++j) out[j] = acc[j];
      } else if (from >= kFromSlot) {
#pragma unroll
        for (int j = 0; j < kChainVec; ++j) {
          out[j] = slots[((from - kFromSlot) * kChainVec + j) * kChainThreads + threadIdx.x];
        }
      } else {
        chain_operand(p, from, place, out);
      }
    };
    for (int k = 0; k < p.steps; ++k) {
      const EwiseStep& s = p.step[k];
      if (s.opcode == kConst) {
#pragma unroll
        for (int j = 0; j < kChainVec; ++j) acc[j] = s.imm;
      } else {
        float a[kChainVec], b[kChainVec] = {}, c[kChainVec] = {};
        fetch(s.a, a);
        if (s.opcode >= kAdd) fetch(s.b, b);
        if (s.opcode >= kWhere) fetch(s.c, c);
        chain_apply(s.opcode, acc, a, b, c);
      }
      if (s.dst >= 0) {
#pragma unroll
        for (int j = 0; j < kChainVec; ++j) {
          slots[(s.dst * kChainVec + j) * kChainThreads + threadIdx.x] = acc[j];
        }
      }
    }
    chain_store(p, vector, acc);
  }
}

}  // namespace rm::cuda_ops
