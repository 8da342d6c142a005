// A team of threads an element of y: a block over any axes, a warp or a block over a dense row in
// 16-byte vectors, or a lane of 32 neighbouring columns. The order of a sum is fixed.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/walk_shim.hpp"
#include "reduction/api.hpp"

namespace rm::cuda_ops {

struct ReductionArgs {
  const void* x;
  void* y;
  Walk<2> kept;     // offsets in x and y
  Walk<1> reduced;  // offsets in x
};

/// A partial result: a value, and for arg* where it was.
struct Best {
  float value;
  std::int64_t index;
};

template <Reduce kKind>
struct Reducer {
  static constexpr bool kArg = kKind == Reduce::argmax || kKind == Reduce::argmin;
  static constexpr bool kLargest = kKind == Reduce::max || kKind == Reduce::argmax;
  static constexpr bool kExtreme = kArg || kKind == Reduce::max || kKind == Reduce::min;
  __device__ static Best identity() {
    const float infinity = __int_as_float(0x7f800000);
    if constexpr (kExtreme) return {kLargest ? -infinity : infinity, 0x7fffffffffffffffll};
    return {kKind == Reduce::prod ? 1.0f : 0.0f, 0};
  }
  __device__ __forceinline__ static Best join(Best a, Best b) {
    if constexpr (kKind == Reduce::sum || kKind == Reduce::mean) return {a.value + b.value, 0};
    if constexpr (kKind == Reduce::prod) return {a.value * b.value, 0};
    const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
    const bool better = kLargest ? b.value > a.value : b.value < a.value;
    const bool equal = a.value == b.value || (a_nan && b_nan);
    const bool take = (b_nan && !a_nan) || (!a_nan && better) || (equal && b.index < a.index);
    return take ? b : a;
  }
  __device__ static Best warp(Best x) {
#pragma unroll
    for (int k = 16; k > 0; k >>= 1) {
      Best other{__shfl_xor_sync(0xffffffffu, x.value, k), 0};
      if constexpr (kArg) other.index = __shfl_xor_sync(0xffffffffu, x.index, k);
      x = join(x, other);
    }
    return x;
  }
  /// Over the block; the first thread has the result.
  __device__ static Best block(Best x) {
    __shared__ Best part[32];
    x = warp(x);
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = x;
    __syncthreads();
    const int warps = blockDim.x / 32;
    x = static_cast<int>(threadIdx.x) < warps ? part[threadIdx.x] : identity();
    if (threadIdx.x < 32) x = warp(x);
    __syncthreads();
    return x;
  }
  template <class T>
  __device__ static void store(void* y, std::int64_t at, Best x, std::int64_t count) {
    if constexpr (kArg) {
      static_cast<std::int64_t*>(y)[at] = x.index;
    } else {
      const float v = kKind == Reduce::mean ? x.value / static_cast<float>(count) : x.value;
      static_cast<T*>(y)[at] = from_float<T>(v);
    }
  }
};

/// One block an element of y, any axes.
template <class T, Reduce kKind>
__global__ void __launch_bounds__(256) reduce_axes(const __grid_constant__ ReductionArgs p) {
  using R = Reducer<kKind>;
  for (std::int64_t i = blockIdx.x; i < p.kept.total; i += gridDim.x) {
    std::int64_t base[2];
    walk_offsets(p.kept, i, base);
    Best best = R::identity();
    for (std::int64_t j = threadIdx.x; j < p.reduced.total; j += blockDim.x) {
      std::int64_t at[1];
      walk_offsets(p.reduced, j, at);
      best = R::join(best, {to_float(static_cast<const T*>(p.x)[base[0] + at[0]]), j});
    }
    best = R::block(best);
    if (threadIdx.x == 0) R::template store<T>(p.y, base[1], best, p.reduced.total);
  }
}

/// Reduced elements dense: a warp (kWarp) or a block a row, in vectors.
template <class T, Reduce kKind, bool kWarp>
__global__ void __launch_bounds__(256) reduce_rows(const __grid_constant__ ReductionArgs p) {
  using R = Reducer<kKind>;
  constexpr int V = kVec<T>;
  const int threads = kWarp ? 32 : 256, thread = threadIdx.x % threads, teams = 256 / threads;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * teams;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * teams + threadIdx.x / threads;
       i < p.kept.total; i += step) {
    std::int64_t base[2];
    walk_offsets(p.kept, i, base);
    const T* row = static_cast<const T*>(p.x) + base[0];
    Best best = R::identity();
#pragma unroll 4
    for (std::int64_t j = thread * V; j < p.reduced.total; j += threads * V) {
      float v[V];
      load_vec<T, V>(row + j, v);
#pragma unroll
      for (int k = 0; k < V; ++k) best = R::join(best, {v[k], j + k});
    }
    best = kWarp ? R::warp(best) : R::block(best);
    if (thread == 0) R::template store<T>(p.y, base[1], best, p.reduced.total);
  }
}

/// The last kept axis dense in x: 32 columns by 8 lanes a block.
template <class T, Reduce kKind>
__global__ void __launch_bounds__(256) reduce_columns(const __grid_constant__ ReductionArgs p) {
  using R = Reducer<kKind>;
  __shared__ Best part[8][32];
  const std::int64_t i = blockIdx.x * 32ll + threadIdx.x;
  std::int64_t base[2] = {0, 0};
  Best best = R::identity();
  if (i < p.kept.total) {
    walk_offsets(p.kept, i, base);
#pragma unroll 4
    for (std::int64_t j = threadIdx.y; j < p.reduced.total; j += 8) {
      std::int64_t at[1];
      walk_offsets(p.reduced, j, at);
      best = R::join(best, {to_float(static_cast<const T*>(p.x)[base[0] + at[0]]), j});
    }
  }
  part[threadIdx.y][threadIdx.x] = best;
  __syncthreads();
  if (threadIdx.y != 0 || i >= p.kept.total) return;
#pragma unroll
  for (int r = 1; r < 8; ++r) best = R::join(best, part[r][threadIdx.x]);
  R::template store<T>(p.y, base[1], best, p.reduced.total);
}

}  // namespace rm::cuda_ops
