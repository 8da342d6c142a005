// One element a thread: its place in both tensors, moved along the indexed axes. Bound: latency.
#pragma once

#include "_shim/divide_shim.hpp"
#include "indexing/api.hpp"

namespace rm::cuda_ops {

struct IndexingArgs {
  const void* x;
  void* y;
  int rank, indices;
  bool moves_y, from_end;
  std::int64_t total;
  std::int64_t shape[kMaxRank], x_stride[kMaxRank], y_stride[kMaxRank];
  const void* index[kMostIndices];
  bool wide[kMostIndices];
  std::int64_t index_stride[kMostIndices][kMaxRank];
  std::int64_t size[kMostIndices], step[kMostIndices];  // of the indexed axes
};

template <class E>
__global__ void __launch_bounds__(256) indexing_elements(const __grid_constant__ IndexingArgs a) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t e = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       e < a.total; e += stride) {
    std::int64_t rest = e, from = 0, to = 0, at[kMostIndices] = {};
    for (int d = a.rank - 1; d >= 0; --d) {
      const std::int64_t outer = rest / a.shape[d], i = rest - outer * a.shape[d];
      rest = outer;
      from += i * a.x_stride[d], to += i * a.y_stride[d];
#pragma unroll
      for (int k = 0; k < kMostIndices; ++k) {
        if (k < a.indices) at[k] += i * a.index_stride[k][d];
      }
    }
#pragma unroll
    for (int k = 0; k < kMostIndices; ++k) {
      if (k >= a.indices) continue;
      std::int64_t i = a.wide[k] ? static_cast<const std::int64_t*>(a.index[k])[at[k]]
                                 : static_cast<const std::int32_t*>(a.index[k])[at[k]];
      if (a.from_end && i < 0) i += a.size[k];
      if (i < 0 || i >= a.size[k]) __trap();
      (a.moves_y ? to : from) += i * a.step[k];
    }
    static_cast<E*>(a.y)[to] = static_cast<const E*>(a.x)[from];
  }
}

}  // namespace rm::cuda_ops
