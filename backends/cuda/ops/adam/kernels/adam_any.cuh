// A block takes 1024 elements of one parameter, four a thread, in vectors where all of its tensors
// lie on 16 bytes. Everything is read and written once. Bound: memory; of small ones the launch.
#pragma once

#include <cstdint>

#include "adam/api.hpp"

namespace rm::cuda_ops {

inline constexpr int kAdamTensors = 32, kAdamElements = 1024;

struct AdamPointers {
  const float *p, *g, *m, *v, *largest;
  float *new_p, *new_m, *new_v, *new_largest;
  std::int64_t size;
  int first_block;
  bool vectors;
};

struct AdamArgs {
  const float* numbers;
  std::int64_t number_step;
  const bool* apply;
  int tensors, decay;
  bool maximize;
  AdamPointers tensor[kAdamTensors];
};

struct AdamNumbers {
  float decay, keep, new1, old2, new2, eps, step, root;
};

template <int kDecay, bool kLargest>
__device__ __forceinline__ void adam_element(const AdamNumbers& n, bool maximize, float& p, float g,
                                             float& m, float& v, float& largest) {
  if (maximize) g = -g;
  if (kDecay == static_cast<int>(AdamDecay::parameter)) p *= n.keep;
  if (kDecay == static_cast<int>(AdamDecay::gradient)) g += p * n.decay;
  m += (g - m) * n.new1;
  v = v * n.old2 + g * g * n.new2;
  float second = v;
  if (kLargest) second = largest = isnan(largest) || largest > v ? largest : v;
  p -= m / (sqrtf(second) / n.root + n.eps) * n.step;
}

template <int kDecay, bool kLargest>
__global__ void __launch_bounds__(256) adam_update_elements(const __grid_constant__ AdamArgs a) {
  int t = 0;
  for (int last = a.tensors; last - t > 1;) {  // the last tensor that begins at or before the block
    const int middle = (t + last) / 2;
    (a.tensor[middle].first_block <= static_cast<int>(blockIdx.x) ? t : last) = middle;
  }
  const AdamPointers& of = a.tensor[t];
  const bool applies = a.apply == nullptr || *a.apply;
  const auto number = [&](int i) { return a.numbers[i * a.number_step]; };
  const AdamNumbers n{number(0), number(1), number(2), number(3),
                      number(4), number(5), number(6), number(7)};
  const std::int64_t first =
      static_cast<std::int64_t>(static_cast<int>(blockIdx.x) - of.first_block) * kAdamElements;
  const std::int64_t i = first + 4 * threadIdx.x;
  if (of.vectors && i + 4 <= of.size) {
    const auto load = [&](const float* from) { return *reinterpret_cast<const float4*>(from + i); };
    const auto store = [&](float* to, const float (&x)[4]) {
      *reinterpret_cast<float4*>(to + i) = make_float4(x[0], x[1], x[2], x[3]);
    };
    const float4 p4 = load(of.p), g4 = load(of.g), m4 = load(of.m), v4 = load(of.v);
    const float4 l4 = kLargest ? load(of.largest) : make_float4(0, 0, 0, 0);
    float p[4] = {p4.x, p4.y, p4.z, p4.w}, m[4] = {m4.x, m4.y, m4.z, m4.w};
    float v[4] = {v4.x, v4.y, v4.z, v4.w}, l[4] = {l4.x, l4.y, l4.z, l4.w};
    const float g[4] = {g4.x, g4.y, g4.z, g4.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (applies) adam_element<kDecay, kLargest>(n, a.maximize, p[j], g[j], m[j], v[j], l[j]);
    }
    store(of.new_p, p), store(of.new_m, m), store(of.new_v, v);
    if (kLargest) store(of.new_largest, l);
    return;
  }
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    // In vectors only the last elements come here, which are their own thread's.
    const std::int64_t at = of.vectors ? i + u : first + u * 256 + threadIdx.x;
    if (at >= of.size) continue;
    float p = of.p[at], m = of.m[at], v = of.v[at], l = kLargest ? of.largest[at] : 0.0f;
    if (applies) adam_element<kDecay, kLargest>(n, a.maximize, p, of.g[at], m, v, l);
    of.new_p[at] = p, of.new_m[at] = m, of.new_v[at] = v;
    if (kLargest) of.new_largest[at] = l;
  }
}

}  // namespace rm::cuda_ops
