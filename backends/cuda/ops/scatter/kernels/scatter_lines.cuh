// A thread takes everything along the axis, one after the other. Bound: latency.
#pragma once

#include <cstdint>

#include "scatter/api.hpp"

namespace rm::cuda_ops {

struct ScatterLinesArgs {
  const void* index;
  bool wide;
  const float* src;
  float* y;
  int rank;  // of the axes that are not the scattered one
  std::int64_t shape[kMaxRank], index_stride[kMaxRank], src_stride[kMaxRank], y_stride[kMaxRank];
  std::int64_t lines, length, targets;  // along the axis: of src, of y
  std::int64_t index_step, src_step, y_step;
};

__device__ __forceinline__ std::int64_t scatter_id(const void* ids, bool wide, std::int64_t at) {
  return wide ? static_cast<const std::int64_t*>(ids)[at] : static_cast<const std::int32_t*>(ids)[at];
}

template <ScatterKind kKind>
__device__ __forceinline__ float scattered(float was, float x) {
  if (kKind == ScatterKind::add) return was + x;
  if (kKind == ScatterKind::mul) return was * x;
  if (kKind == ScatterKind::max) return isnan(was) || was > x ? was : x;
  if (kKind == ScatterKind::min) return isnan(was) || was < x ? was : x;
  return x;
}

template <ScatterKind kKind>
__global__ void __launch_bounds__(256) scatter_lines(const __grid_constant__ ScatterLinesArgs a) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t line = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       line < a.lines; line += stride) {
    std::int64_t rest = line, at = 0, from = 0, to = 0;
    for (int d = a.rank - 1; d >= 0; --d) {
      const std::int64_t outer = rest / a.shape[d], i = rest - outer * a.shape[d];
      rest = outer;
      at += i * a.index_stride[d], from += i * a.src_stride[d], to += i * a.y_stride[d];
    }
    for (std::int64_t i = 0; i < a.length; ++i) {
      const std::int64_t id = scatter_id(a.index, a.wide, at + i * a.index_step);
      if (id < 0 || id >= a.targets) __trap();
      float& y = a.y[to + id * a.y_step];
      y = scattered<kKind>(y, a.src[from + i * a.src_step]);
    }
  }
}

}  // namespace rm::cuda_ops
