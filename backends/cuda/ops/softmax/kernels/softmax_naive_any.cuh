// One block a row, element by element, the row read again for each pass: any n, any alignment.
#pragma once

#include "_shim/device_shim.cuh"
#include "softmax/kernels/softmax_args.hpp"

namespace rm::cuda_ops {

template <class T, bool kLog>
__global__ void softmax_forward_naive(const SoftmaxArgs p) {
  for (std::int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_pitch;
    T* y = static_cast<T*>(p.out) + row * p.out_pitch;
    float top = Max::kIdentity, total = 0.0f;
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) top = Max{}(top, to_float(x[i]));
    top = block_reduce<Max>(top);
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) total += expf(to_float(x[i]) - top);
    total = block_reduce<Sum>(total);
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
      const float v = to_float(x[i]) - top;
      y[i] = from_float<T>(kLog ? v - logf(total) : expf(v) / total);
    }
  }
}

template <class T, bool kLog>
__global__ void softmax_backward_naive(const SoftmaxArgs p) {
  for (std::int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* y = static_cast<const T*>(p.x) + row * p.x_pitch;
    const T* dy = static_cast<const T*>(p.dy) + row * p.dy_pitch;
    T* dx = static_cast<T*>(p.out) + row * p.out_pitch;
    float total = 0.0f;
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
      total += kLog ? to_float(dy[i]) : to_float(dy[i]) * to_float(y[i]);
    }
    total = block_reduce<Sum>(total);
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
      const float v = to_float(y[i]), d = to_float(dy[i]);
      dx[i] = from_float<T>(kLog ? d - expf(v) * total : v * (d - total));
    }
  }
}

}  // namespace rm::cuda_ops
