// Many values into few places, as counts are made: a block an element of y goes through the whole line,
// and its threads' parts meet in a fixed order. Bound: reading the ids once a place, from the L2 cache.
#pragma once

#include "scatter/kernels/scatter_lines.cuh"

namespace rm::cuda_ops {

template <class T, ScatterKind kKind>
__global__ void __launch_bounds__(256) scatter_targets(const __grid_constant__ ScatterLinesArgs a) {
  using W = decltype(scatter_wide(T{}));
  __shared__ W part[256];
  __shared__ bool found[256];
  const int thread = static_cast<int>(threadIdx.x);
  for (std::int64_t e = blockIdx.x; e < a.lines * a.targets; e += gridDim.x) {
    const std::int64_t line = e / a.targets, target = e - line * a.targets;
    const ScatterPlace at = scatter_place(a, line);
    W mine{};
    bool any = false;
    for (std::int64_t i = thread; i < a.length; i += 256) {
      const std::int64_t id = scatter_id(a.index, a.wide, at.index + i * a.index_step);
      if (id < 0 || id >= a.targets) __trap();
      if (id != target) continue;
      const W x = scatter_wide(static_cast<const T*>(a.src)[at.src + i * a.src_step]);
      mine = any ? scattered<kKind>(mine, x) : x;
      any = true;
    }
    part[thread] = mine, found[thread] = any;
    for (int width = 128; width > 0; width /= 2) {
      __syncthreads();
      if (thread >= width || !found[thread + width]) continue;
      const W other = part[thread + width];
      part[thread] = found[thread] ? scattered<kKind>(part[thread], other) : other;
      found[thread] = true;
    }
    if (thread == 0 && found[0]) {
      T& y = static_cast<T*>(a.y)[at.y + target * a.y_step];
      y = scatter_narrow<T>(scattered<kKind>(scatter_wide(y), part[0]));
    }
    __syncthreads();  // the parts are read
  }
}

}  // namespace rm::cuda_ops
