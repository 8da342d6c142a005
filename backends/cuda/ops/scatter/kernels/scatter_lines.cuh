// A thread takes everything along the axis, one after the other. Bound: latency. And what all kernels
// share: arguments, places, and how two values become one.
#pragma once

#include <cstdint>
#include <type_traits>

#include "_shim/device_shim.cuh"
#include "scatter/api.hpp"

namespace rm::cuda_ops {

struct ScatterLinesArgs {
  const void* index;
  bool wide;
  const void* src;
  void* y;
  int rank;  // of the axes that are not the scattered one
  std::int64_t shape[kMaxRank], index_stride[kMaxRank], src_stride[kMaxRank], y_stride[kMaxRank];
  std::int64_t lines, length, targets;  // along the axis: of src, of y
  std::int64_t index_step, src_step, y_step;
};

__device__ __forceinline__ std::int64_t scatter_id(const void* ids, bool wide, std::int64_t at) {
  return wide ? static_cast<const std::int64_t*>(ids)[at] : static_cast<const std::int32_t*>(ids)[at];
}

/// Where a line begins.
struct ScatterPlace {
  std::int64_t index = 0, src = 0, y = 0;
};

__device__ __forceinline__ ScatterPlace scatter_place(const ScatterLinesArgs& a, std::int64_t line) {
  ScatterPlace p;
  for (int d = a.rank - 1; d >= 0; --d) {
    const std::int64_t outer = line / a.shape[d], i = line - outer * a.shape[d];
    line = outer;
    p.index += i * a.index_stride[d], p.src += i * a.src_stride[d], p.y += i * a.y_stride[d];
  }
  return p;
}

/// What two values are combined in: fp32 for floats up to 32 bits. Integers wrap.
template <class T>
__device__ __forceinline__ auto scatter_wide(T x) {
  if constexpr (std::is_integral_v<T> || std::is_same_v<T, double>) {
    return x;
  } else {
    return to_float(x);
  }
}
template <class T, class W>
__device__ __forceinline__ T scatter_narrow(W x) {
  if constexpr (std::is_same_v<T, W>) {
    return x;
  } else {
    return from_float<T>(x);
  }
}

/// `was` and `x`, with NaN winning in max and min.
template <ScatterKind kKind, class W>
__device__ __forceinline__ W scattered(W was, W x) {
  if constexpr (kKind == ScatterKind::set) {
    return x;
  } else if constexpr (kKind == ScatterKind::max || kKind == ScatterKind::min) {
    if (was != was) return was;
    return (kKind == ScatterKind::max ? was > x : was < x) ? was : x;
  } else if constexpr (std::is_integral_v<W>) {
    using U = std::make_unsigned_t<W>;
    const U a = static_cast<U>(was), b = static_cast<U>(x);
    return static_cast<W>(kKind == ScatterKind::add ? a + b : a * b);
  } else {
    return kKind == ScatterKind::add ? was + x : was * x;
  }
}

template <class T, ScatterKind kKind>
__global__ void __launch_bounds__(256) scatter_lines(const __grid_constant__ ScatterLinesArgs a) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t line = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       line < a.lines; line += stride) {
    const ScatterPlace at = scatter_place(a, line);
    for (std::int64_t i = 0; i < a.length; ++i) {
      const std::int64_t id = scatter_id(a.index, a.wide, at.index + i * a.index_step);
      if (id < 0 || id >= a.targets) __trap();
      T& y = static_cast<T*>(a.y)[at.y + id * a.y_step];
      const T x = static_cast<const T*>(a.src)[at.src + i * a.src_step];
      if constexpr (kKind == ScatterKind::set) {
        y = x;
      } else {
        y = scatter_narrow<T>(scattered<kKind>(scatter_wide(y), scatter_wide(x)));
      }
    }
  }
}

}  // namespace rm::cuda_ops
