// Blocks of 256 threads take 4096 elements of one tensor; up to 32 tensors a launch. Bound: memory.
#pragma once

#include "_shim/device_shim.cuh"

namespace rm::cuda_ops {

inline constexpr int kOptimTensors = 32, kOptimElements = 4096;

struct OptimArgs {
  void* param[kOptimTensors];
  const void* grad[kOptimTensors];
  void *m[kOptimTensors], *v[kOptimTensors];
  std::int64_t size[kOptimTensors];
  int first_block[kOptimTensors + 1];  // a tensor's blocks
  int tensors, kind;                   // Optimiser
  double beta1, beta2, step;
  float lr, eps, weight_decay, momentum;
  bool nesterov;
  const void* device_step;
  bool step_is_float;
};

struct OptimFactors {
  float step_size, root_correction;
};

/// lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t), in double, once a block.
__device__ __forceinline__ OptimFactors optim_factors(const OptimArgs& p) {
  double t = p.step;
  if (p.device_step) {
    t = p.step_is_float ? static_cast<double>(*static_cast<const float*>(p.device_step))
                        : static_cast<double>(*static_cast<const std::int64_t*>(p.device_step));
  }
  if (p.kind == 0) return {p.lr, 1.0f};
  const double first = p.beta1 > 0 ? -expm1(t * log(p.beta1)) : 1.0;
  const double second = p.beta2 > 0 ? -expm1(t * log(p.beta2)) : 1.0;
  return {static_cast<float>(p.lr / first), static_cast<float>(1.0 / sqrt(second))};
}

__device__ __forceinline__ void optim_element(const OptimArgs& p, const OptimFactors& f, float& x,
                                              float g, float& m, float& v) {
  if (p.kind == 0) {
    g += p.weight_decay * x;
    if (p.momentum != 0.0f) {
      m = p.momentum * m + g;
      g = p.nesterov ? g + p.momentum * m : m;
    }
    x -= p.lr * g;
    return;
  }
  if (p.kind == 1) {
    g += p.weight_decay * x;
  } else {
    x -= p.lr * p.weight_decay * x;
  }
  const float b2 = static_cast<float>(p.beta2);
  m += static_cast<float>(1.0 - p.beta1) * (g - m);
  v = b2 * v + static_cast<float>(1.0 - p.beta2) * g * g;
  x -= f.step_size * m / (sqrtf(v) * f.root_correction + p.eps);
}

template <class T, class S, int kV>
__global__ void __launch_bounds__(256) optim_step(const __grid_constant__ OptimArgs p) {
  __shared__ OptimFactors shared;
  if (threadIdx.x == 0) shared = optim_factors(p);
  int t = 0;
  while (static_cast<int>(blockIdx.x) >= p.first_block[t + 1]) ++t;
  __syncthreads();
  const OptimFactors f = shared;
  const std::int64_t first =
      (static_cast<std::int64_t>(blockIdx.x) - p.first_block[t]) * kOptimElements;
  const std::int64_t last = min(p.size[t], first + kOptimElements);
  T* param = static_cast<T*>(p.param[t]);
  const T* grad = static_cast<const T*>(p.grad[t]);
  S *m_all = static_cast<S*>(p.m[t]), *v_all = static_cast<S*>(p.v[t]);
#pragma unroll 2
  for (std::int64_t i = first + threadIdx.x * kV; i < last; i += 256 * kV) {
    float x[kV], g[kV], m[kV] = {}, v[kV] = {};
    load_vec<T, kV>(param + i, x);
    load_vec<T, kV>(grad + i, g);
    if (m_all) load_vec<S, kV>(m_all + i, m);
    if (v_all) load_vec<S, kV>(v_all + i, v);
#pragma unroll
    for (int j = 0; j < kV; ++j) optim_element(p, f, x[j], g[j], m[j], v[j]);
    store_vec<T, kV>(param + i, x);
    if (m_all) store_vec<S, kV>(m_all + i, m);
    if (v_all) store_vec<S, kV>(v_all + i, v);
  }
}

}  // namespace rm::cuda_ops
