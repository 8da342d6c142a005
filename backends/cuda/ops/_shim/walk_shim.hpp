// Axes of several tensors of one shape, merged where every tensor allows it, and the way from an
// element's number to its offsets.
#pragma once

#include <initializer_list>

#include "_shim/tensor_shim.hpp"

namespace rm::cuda_ops {

template <int kTensors>
struct Walk {
  int rank = 0;
  std::int64_t total = 1;
  std::int64_t shape[kMaxRank] = {};
  std::int64_t stride[kTensors][kMaxRank] = {};  // in elements
};

/// Axes of size 1 go, neighbours merge; rank 0 only for a single element.
template <int kTensors>
Walk<kTensors> walk_of(const Tensor* const (&tensors)[kTensors]) {
  Walk<kTensors> w;
  const Tensor& like = *tensors[0];
  for (int d = 0; d < like.rank; ++d) {
    w.total *= like.shape[d];
    if (like.shape[d] == 1) continue;
    bool merge = w.rank > 0;
    for (int t = 0; merge && t < kTensors; ++t) {
      merge = w.stride[t][w.rank - 1] == tensors[t]->stride[d] * like.shape[d];
    }
    if (!merge) w.shape[w.rank++] = 1;
    w.shape[w.rank - 1] *= like.shape[d];
    for (int t = 0; t < kTensors; ++t) w.stride[t][w.rank - 1] = tensors[t]->stride[d];
  }
  return w;
}

#ifdef __CUDACC__
/// Offsets of element `index`, the last axis fastest.
template <int kTensors>
__device__ __forceinline__ void walk_offsets(const Walk<kTensors>& w, std::int64_t index,
                                             std::int64_t (&out)[kTensors]) {
#pragma unroll
  for (int t = 0; t < kTensors; ++t) out[t] = 0;
  for (int d = w.rank - 1; d > 0; --d) {
    const std::int64_t rest = index / w.shape[d], at = index - rest * w.shape[d];
    index = rest;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) out[t] += at * w.stride[t][d];
  }
#pragma unroll
  for (int t = 0; t < kTensors; ++t) out[t] += index * w.stride[t][0];
}
#endif

}  // namespace rm::cuda_ops
