// One block a row, element by element, the row read again for each pass: any n, any alignment.
#pragma once

#include "_shim/device_shim.cuh"
#include "norm/kernels/norm_args.hpp"

namespace rm::cuda_ops {

struct Moments {
  float mean, rstd;
};

/// value(i) gives element i of the row; called by the whole block.
template <bool kRms, class Value>
__device__ Moments moments_of(const Value& value, int n, float eps) {
  float mean = 0.0f;
  if constexpr (!kRms) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) mean += value(i);
    mean = block_reduce<Sum>(mean) / static_cast<float>(n);
  }
  float square = 0.0f;
  for (int i = threadIdx.x; i < n; i += blockDim.x) {
    const float d = value(i) - mean;
    square += d * d;
  }
  square = block_reduce<Sum>(square) / static_cast<float>(n);
  return {mean, rsqrtf(square + eps)};
}

template <class T, bool kRms>
__global__ void norm_forward_naive(const NormForwardArgs p) {
  for (std::int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_pitch;
    const T* r = p.residual ? static_cast<const T*>(p.residual) + row * p.residual_pitch : nullptr;
    const auto value = [x, r](int i) { return to_float(x[i]) + (r ? to_float(r[i]) : 0.0f); };
    const Moments m = moments_of<kRms>(value, p.n, p.eps);
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
      const float h = value(i);
      float y = (h - m.mean) * m.rstd;
      if (p.weight) y *= to_float(static_cast<const T*>(p.weight)[i]) + p.weight_offset;
      if (p.bias) y += to_float(static_cast<const T*>(p.bias)[i]);
      if (p.sum) static_cast<T*>(p.sum)[row * p.sum_pitch + i] = from_float<T>(h);
      static_cast<T*>(p.y)[row * p.y_pitch + i] = from_float<T>(y);
    }
  }
}

/// dx; the row's moments go to p.partial for the columns' kernel.
template <class T, bool kRms>
__global__ void norm_backward_naive(const NormBackwardArgs p) {
  for (std::int64_t row = blockIdx.x; row < p.rows; row += gridDim.x) {
    const T* h = static_cast<const T*>(p.h) + row * p.h_pitch;
    const T* dy = static_cast<const T*>(p.dy) + row * p.dy_pitch;
    const Moments m = moments_of<kRms>([h](int i) { return to_float(h[i]); }, p.n, p.eps);
    const auto grad = [&](int i) {
      const float w =
          p.weight ? to_float(static_cast<const T*>(p.weight)[i]) + p.weight_offset : 1.0f;
      return to_float(dy[i]) * w;
    };
    float g = 0.0f, gx = 0.0f;
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
      g += grad(i);
      gx += grad(i) * (to_float(h[i]) - m.mean) * m.rstd;
    }
    g = kRms ? 0.0f : block_reduce<Sum>(g) / static_cast<float>(p.n);
    gx = block_reduce<Sum>(gx) / static_cast<float>(p.n);
    for (int i = threadIdx.x; i < p.n; i += blockDim.x) {
      float d = m.rstd * (grad(i) - g - (to_float(h[i]) - m.mean) * m.rstd * gx);
      if (p.dsum) d += to_float(static_cast<const T*>(p.dsum)[row * p.dsum_pitch + i]);
      static_cast<T*>(p.dx)[row * p.dx_pitch + i] = from_float<T>(d);
    }
    if (p.partial && threadIdx.x == 0) p.partial[2 * row] = m.mean, p.partial[2 * row + 1] = m.rstd;
  }
}

/// dweight and dbias from dy, h and the rows' moments. Blocks of 32 columns x 8 lanes.
template <class T>
__global__ void norm_columns_naive(const NormBackwardArgs p) {
  __shared__ float part[2][8][33];
  const int column = blockIdx.x * 32 + threadIdx.x;
  float dw = 0.0f, db = 0.0f;
  if (column < p.n) {
    for (std::int64_t row = threadIdx.y; row < p.rows; row += 8) {
      const float d = to_float(static_cast<const T*>(p.dy)[row * p.dy_pitch + column]);
      const float h = to_float(static_cast<const T*>(p.h)[row * p.h_pitch + column]);
      dw += d * (h - p.partial[2 * row]) * p.partial[2 * row + 1];
      db += d;
    }
  }
  part[0][threadIdx.y][threadIdx.x] = dw;
  part[1][threadIdx.y][threadIdx.x] = db;
  __syncthreads();
  if (threadIdx.y != 0 || column >= p.n) return;
  for (int k = 1; k < 8; ++k) dw += part[0][k][threadIdx.x], db += part[1][k][threadIdx.x];
  if (p.dweight) static_cast<T*>(p.dweight)[column] = from_float<T>(dw);
  if (p.dbias) static_cast<T*>(p.dbias)[column] = from_float<T>(db);
}

}  // namespace rm::cuda_ops
