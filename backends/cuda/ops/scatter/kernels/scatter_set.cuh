// Values written by a thread each: first every place learns the last of src that names it, then that one
// is written. Bound: latency.
#pragma once

#include "scatter/kernels/scatter_lines.cuh"

namespace rm::cuda_ops {

/// winner [lines, targets] holds -1. With kWrite it holds what the launch without found.
template <class T, bool kWrite>
__global__ void __launch_bounds__(256)
    scatter_set(const __grid_constant__ ScatterLinesArgs a, int* winner) {
  const std::int64_t stride = gridDim.x * 256ll, total = a.lines * a.length;
  for (std::int64_t e = blockIdx.x * 256ll + threadIdx.x; e < total; e += stride) {
    const std::int64_t line = e / a.length, i = e - line * a.length;
    const ScatterPlace at = scatter_place(a, line);
    const std::int64_t id = scatter_id(a.index, a.wide, at.index + i * a.index_step);
    if (id < 0 || id >= a.targets) __trap();
    int& last = winner[line * a.targets + id];
    if constexpr (!kWrite) {
      atomicMax(&last, static_cast<int>(i));
    } else if (last == static_cast<int>(i)) {
      static_cast<T*>(a.y)[at.y + id * a.y_step] =
          static_cast<const T*>(a.src)[at.src + i * a.src_step];
    }
  }
}

}  // namespace rm::cuda_ops
