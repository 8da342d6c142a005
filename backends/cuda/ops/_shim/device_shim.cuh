// Device primitives shared by the operators: 16-byte vectors of any float dtype as fp32 values, and
// sums and maxima over a warp or a block. Every value is widened to fp32 and rounded once at the
// end.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace rm::cuda_ops {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

/// Elements of T in 16 bytes.
template <class T>
inline constexpr int kVec = 16 / sizeof(T);

template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
  T v[V];
};

template <class T, int V>
__device__ __forceinline__ void load_vec(const T* src, float (&out)[V]) {
  const Pack<T, V> p = *reinterpret_cast<const Pack<T, V>*>(src);
#pragma unroll
  for (int i = 0; i < V; ++i) out[i] = to_float(p.v[i]);
}

template <class T, int V>
__device__ __forceinline__ void store_vec(T* dst, const float (&in)[V]) {
  Pack<T, V> p;
#pragma unroll
  for (int i = 0; i < V; ++i) p.v[i] = from_float<T>(in[i]);
  *reinterpret_cast<Pack<T, V>*>(dst) = p;
}

/// Makes the compiler convert a pack again at its next use: rows wait in registers as 16-byte
/// packs, not as the fp32 values of the last pass, which leaves registers for more loads in flight.
template <class T, int V>
__device__ __forceinline__ void forget_values(Pack<T, V>& p) {
  static_assert(sizeof(p) == 16);
  unsigned w[4];
  memcpy(w, &p, 16);
  asm volatile("" : "+r"(w[0]), "+r"(w[1]), "+r"(w[2]), "+r"(w[3]));
  memcpy(&p, w, 16);
}

struct Sum {
  static constexpr float kIdentity = 0.0f;
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
};
struct Max {  // NaN wins, as in torch
  static constexpr float kIdentity = -__builtin_huge_valf();
  __device__ __forceinline__ float operator()(float a, float b) const {
    float m;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(m) : "f"(a), "f"(b));
    return m;
  }
};

template <class Op>
__device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
  for (int k = 16; k > 0; k >>= 1) x = Op{}(x, __shfl_xor_sync(0xffffffffu, x, k));
  return x;
}

/// Over a block of any whole number of warps; every thread gets the result. Called by all threads;
/// may be called again at once.
template <class Op>
__device__ __forceinline__ float block_reduce(float x) {
  __shared__ float part[32];
  x = warp_reduce<Op>(x);
  const int warps = blockDim.x / 32;
  if (warps == 1) return x;
  __syncthreads();  // the previous call's readers are done
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_reduce<Op>(static_cast<int>(threadIdx.x % 32) < warps ? part[threadIdx.x % 32]
                                                                    : Op::kIdentity);
}

/// Over Threads threads: a warp of a block (32) or the whole block.
template <class Op, int Threads>
__device__ __forceinline__ float team_reduce(float x) {
  if constexpr (Threads == 32) {
    return warp_reduce<Op>(x);
  } else {
    return block_reduce<Op>(x);
  }
}

}  // namespace rm::cuda_ops
