// A thread takes kV pairs of elements: x[d] and its partner. Bound: memory.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/walk_shim.hpp"

namespace rm::cuda_ops {

struct RopeArgs {
  const void *x, *cos, *sin;
  void* y;
  std::int64_t shape[3], stride[4][3];  // B, H, S of x, cos, sin, y
  int half;                             // D / 2
  bool interleaved, backward;
};

template <class T, class C, int kV>
__global__ void __launch_bounds__(256) rope_pairs(const RopeArgs p) {
  const int per_row = p.half / kV;
  const std::int64_t total = p.shape[0] * p.shape[1] * p.shape[2] * per_row;
  const std::int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= total) return;
  std::int64_t row, s, h, b;
  int d;
  if (total < 1ll << 32) {  // 32-bit divisions are much cheaper
    const auto j = static_cast<std::uint32_t>(i), n = static_cast<std::uint32_t>(per_row);
    const auto rows = static_cast<std::uint32_t>(p.shape[2]),
               heads = static_cast<std::uint32_t>(p.shape[1]);
    const std::uint32_t r = j / n, outer = r / rows;
    d = static_cast<int>(j - r * n) * kV;
    s = r - outer * rows, b = outer / heads, h = outer - static_cast<std::uint32_t>(b) * heads;
  } else {
    row = i / per_row, d = static_cast<int>(i - row * per_row) * kV;
    s = row % p.shape[2], h = row / p.shape[2] % p.shape[1], b = row / p.shape[2] / p.shape[1];
  }
  const auto at = [&](int t) {
    return b * p.stride[t][0] + h * p.stride[t][1] + s * p.stride[t][2];
  };
  const T* x = static_cast<const T*>(p.x) + at(0);
  const C* cos = static_cast<const C*>(p.cos) + at(1);
  const C* sin = static_cast<const C*>(p.sin) + at(2);
  T* y = static_cast<T*>(p.y) + at(3);
  // positions of the two members of a pair
  const int first = p.interleaved ? 2 * d : d, second = p.interleaved ? 2 * d + 1 : p.half + d;
  float x1[kV], x2[kV], c1[kV], c2[kV], s1[kV], s2[kV];
  load_vec<T, kV>(x + first, x1), load_vec<T, kV>(x + second, x2);
  load_vec<C, kV>(cos + first, c1), load_vec<C, kV>(cos + second, c2);
  load_vec<C, kV>(sin + first, s1), load_vec<C, kV>(sin + second, s2);
  float y1[kV], y2[kV];
#pragma unroll
  for (int j = 0; j < kV; ++j) {
    if (p.backward) {  // the transposed rotation of dy sin
      y1[j] = x1[j] * c1[j] + x2[j] * s2[j];
      y2[j] = x2[j] * c2[j] - x1[j] * s1[j];
    } else {
      y1[j] = x1[j] * c1[j] - x2[j] * s1[j];
      y2[j] = x2[j] * c2[j] + x1[j] * s2[j];
    }
  }
  store_vec<T, kV>(y + first, y1);
  store_vec<T, kV>(y + second, y2);
}

}  // namespace rm::cuda_ops
