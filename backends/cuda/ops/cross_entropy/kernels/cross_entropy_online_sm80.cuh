// Log-sum-exp of a chunk of a row in one pass (running maximum and scaled sum), then one small
// kernel that joins the chunks. kVector: 16-byte vectors; else element by element, for any row.
#pragma once

#include "_shim/device_shim.cuh"
#include "cross_entropy/kernels/cross_entropy_args.hpp"

namespace rm::cuda_ops {

/// A running maximum and the sum of exp(x - maximum). The maximum -inf means an empty sum.
struct Online {
  float top = Max::kIdentity, total = 0.0f;

  /// What is subtracted where the maximum is m: exp(-inf - 0) is 0, where -inf - -inf is NaN. Never
  /// the maximum itself: later values may be far below 0.
  __device__ __forceinline__ static float base_of(float m) {
    return m == Max::kIdentity ? 0.0f : m;
  }

  template <int V>
  __device__ __forceinline__ void add(const float (&x)[V]) {
    float m = top;
#pragma unroll
    for (int j = 0; j < V; ++j) m = fmaxf(m, x[j]);
    const float base = base_of(m);
    float s = 0.0f;
#pragma unroll
    for (int j = 0; j < V; ++j) s += __expf(x[j] - base);  // a NaN arrives here
    total = total * __expf(top - base) + s;
    top = m;
  }

  __device__ __forceinline__ Online over_block() const {
    const float m = block_reduce<Max>(top);
    return {m, block_reduce<Sum>(total * __expf(top - base_of(m)))};
  }
};

template <class T, bool kVector>
__global__ void cross_entropy_chunks(const CrossEntropyArgs p) {
  constexpr int V = kVector ? kVec<T> : 1;
  const std::int64_t first = blockIdx.x * p.chunk;
  const std::int64_t last = min(first + p.chunk, p.n);
  for (std::int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const T* x = static_cast<const T*>(p.logits) + row * p.pitch;
    Online mine;
    const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * V;
    const std::int64_t whole = last - (last - first) % V;  // the row's last vector may be a part
    std::int64_t i = first + threadIdx.x * V;
    for (; i + 3 * step < whole; i += 4 * step) {  // four loads in flight
      float v[4][V];
#pragma unroll
      for (int k = 0; k < 4; ++k) load_vec(x + i + k * step, v[k]);
#pragma unroll
      for (int k = 0; k < 4; ++k) mine.add(v[k]);
    }
    for (; i < whole; i += step) {
      float v[V];
      load_vec(x + i, v);
      mine.add(v);
    }
    if (whole + threadIdx.x < last) {
      const float v[1] = {to_float(x[whole + threadIdx.x])};
      mine.add(v);
    }
    const Online all = mine.over_block();
    if (threadIdx.x == 0) {
      p.partial[2 * (row * p.chunks + blockIdx.x)] = all.top;
      p.partial[2 * (row * p.chunks + blockIdx.x) + 1] = all.total;
    }
  }
}

/// One thread a row.
template <class T>
__global__ void cross_entropy_join(const CrossEntropyArgs p) {
  const std::int64_t row = blockIdx.x * static_cast<std::int64_t>(blockDim.x) + threadIdx.x;
  if (row >= p.rows) return;
  const float* part = p.partial + 2 * row * p.chunks;
  float top = Max::kIdentity, total = 0.0f;
  for (int c = 0; c < p.chunks; ++c) {
    const float m = Max{}(top, part[2 * c]), base = Online::base_of(m);
    total = total * expf(top - base) + part[2 * c + 1] * expf(part[2 * c] - base);
    top = m;
  }
  const float lse = top + logf(total);
  p.lse[row] = lse;
  const std::int64_t t = p.target[row];
  if (t == p.ignore_index) {
    p.loss[row] = 0.0f;
  } else if (t < 0 || t >= p.n) {
    p.loss[row] = __int_as_float(0x7fc00000);
  } else {
    const float x = to_float(static_cast<const T*>(p.logits)[row * p.pitch + t]);
    p.loss[row] = (top - x) + logf(total);  // not lse - x: that loses the logarithm in large logits
  }
}

/// Each block reads and writes one chunk of one row, so dlogits may be logits.
template <class T, bool kVector>
__global__ void cross_entropy_backward_chunks(const CrossEntropyArgs p) {
  constexpr int V = kVector ? kVec<T> : 1;
  const std::int64_t first = blockIdx.x * p.chunk;
  const std::int64_t last = min(first + p.chunk, p.n);
  for (std::int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const T* x = static_cast<const T*>(p.logits) + row * p.pitch;
    T* dx = static_cast<T*>(p.dlogits) + row * p.out_pitch;
    const std::int64_t target = p.target[row];
    const bool ignored = target == p.ignore_index;
    const bool outside = target < 0 || target >= p.n;
    const float lse = p.lse[row];
    const float scale = ignored ? 0.0f : outside ? __int_as_float(0x7fc00000) : p.dloss[row];
    const std::int64_t step = static_cast<std::int64_t>(blockDim.x) * V;
    const std::int64_t whole = last - (last - first) % V;
    if (const std::int64_t at = whole + threadIdx.x; at < last) {
      const float hot = at == target ? 1.0f : 0.0f;
      dx[at] = from_float<T>(ignored ? 0.0f : (__expf(to_float(x[at]) - lse) - hot) * scale);
    }
    for (std::int64_t i = first + threadIdx.x * V; i < whole; i += 2 * step) {
      float v[2][V];
      const bool second = i + step < whole;
      load_vec(x + i, v[0]);
      if (second) load_vec(x + i + step, v[1]);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (k == 1 && !second) break;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float hot = i + k * step + j == target ? 1.0f : 0.0f;
          v[k][j] = ignored ? 0.0f : (__expf(v[k][j] - lse) - hot) * scale;
        }
        store_vec(dx + i + k * step, v[k]);
      }
    }
  }
}

}  // namespace rm::cuda_ops
