// One instruction, all operands and y dense and of one float dtype: four 16-byte vectors a thread
// and operand in flight before the first is used.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/launch_shim.hpp"
#include "ewise/kernels/ewise_args.hpp"
#include "ewise/kernels/ewise_math.cuh"

namespace rm::cuda_ops {

template <class T, int Op, int Arity>
__global__ void __launch_bounds__(256)
    ewise_direct(const T* a, const T* b, T* y, std::int64_t vectors, std::int64_t tail) {
  constexpr int V = kVec<T>, kUnroll = Arity == 1 ? 4 : 2;
  const std::int64_t first =
      static_cast<std::int64_t>(blockIdx.x) * (blockDim.x * kUnroll) + threadIdx.x;
  Pack<T, V> pa[kUnroll], pb[kUnroll];
  overlap_begin(a, b, y);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * blockDim.x;
    if (i >= vectors) break;
    pa[u] = reinterpret_cast<const Pack<T, V>*>(a)[i];
    if constexpr (Arity == 2) pb[u] = reinterpret_cast<const Pack<T, V>*>(b)[i];
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const std::int64_t i = first + u * blockDim.x;
    if (i >= vectors) break;
    Pack<T, V> out;
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if constexpr (Arity == 1) out.v[j] = from_float<T>(apply_as<Op, T>(to_float(pa[u].v[j])));
      if constexpr (Arity == 2) {
        out.v[j] = from_float<T>(apply2<Op>(to_float(pa[u].v[j]), to_float(pb[u].v[j])));
      }
    }
    reinterpret_cast<Pack<T, V>*>(y)[i] = out;
  }
  if (blockIdx.x == 0 && static_cast<std::int64_t>(threadIdx.x) < tail) {
    const std::int64_t i = vectors * V + threadIdx.x;
    if constexpr (Arity == 1) y[i] = from_float<T>(apply_as<Op, T>(to_float(a[i])));
    if constexpr (Arity == 2) y[i] = from_float<T>(apply2<Op>(to_float(a[i]), to_float(b[i])));
  }
}

}  // namespace rm::cuda_ops
