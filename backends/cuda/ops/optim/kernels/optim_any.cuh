// Blocks of 256 threads take 4096 or more elements of one tensor (256 where there are few); up to
// 64 tensors a launch, or one, which spares a small launch the long arguments. Bound: memory.
#pragma once

#include <cmath>

#include "_shim/words_shim.cuh"

namespace rm::cuda_ops {

inline constexpr int kOptimTensors = 64, kOptimElements = 4096;

struct OptimFactors {
  float step_size, root_correction;
};
struct OptimSettings {
  int kind;      // Optimiser
  int elements;  // of a block
  bool nesterov, step_is_float;
  float lr, decay_factor, eps, weight_decay, momentum;
  float first_share, second_beta, second_share;  // 1 - beta1, beta2, 1 - beta2
  double beta1, beta2;
  const void* device_step;
  OptimFactors factors;  // where the step is known before the launch
};

template <int kTensors>
struct OptimArgs {
  OptimSettings settings;
  int tensors, first_block[kTensors + 1];  // a tensor's blocks
  void* param[kTensors];
  const void* grad[kTensors];
  void *m[kTensors], *v[kTensors];
  std::int64_t size[kTensors];
};

/// lr / (1 - beta1^t) and 1 / sqrt(1 - beta2^t), in double.
__host__ __device__ inline OptimFactors optim_factors(const OptimSettings& p, double t) {
  if (p.kind == 0) return {p.lr, 1.0f};
  const double first = p.beta1 > 0 ? -expm1(t * log(p.beta1)) : 1.0;
  const double second = p.beta2 > 0 ? -expm1(t * log(p.beta2)) : 1.0;
  return {static_cast<float>(p.lr / first), static_cast<float>(1.0 / sqrt(second))};
}

__device__ __forceinline__ void optim_element(const OptimSettings& p, const OptimFactors& f,
                                              float& x, float g, float& m, float& v) {
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
    x -= p.decay_factor * x;
  }
  m += p.first_share * (g - m);
  v = p.second_beta * v + p.second_share * g * g;
  float root;  // two units in the last place: the quotient is rounded to x's much coarser ones
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(v));
  x -= __fdividef(f.step_size * m, root * f.root_correction + p.eps);
}

/// kV elements as they wait in registers.
template <class T, int kV>
using OptimHeld = std::conditional_t<sizeof(T) == 2 && kV == 8, uint4, Pack<T, kV>>;
template <class T, int kV>
__device__ __forceinline__ void widen(const OptimHeld<T, kV>& held, float (&v)[kV]) {
  if constexpr (sizeof(T) == 2 && kV == 8) {
    unpack<T>(held, v);
  } else {
#pragma unroll
    for (int j = 0; j < kV; ++j) v[j] = to_float(held.v[j]);
  }
}

/// kStates: there are m or v.
template <class T, class S, int kV, int kTensors, bool kStates>
__global__ void __launch_bounds__(256)
    optim_step(const __grid_constant__ OptimArgs<kTensors> args) {
  __shared__ OptimFactors shared;
  const OptimSettings& p = args.settings;
  if (p.device_step && threadIdx.x == 0) {  // once a block: double precision is slow
    shared = optim_factors(
        p, p.step_is_float ? static_cast<double>(*static_cast<const float*>(p.device_step))
                           : static_cast<double>(*static_cast<const std::int64_t*>(p.device_step)));
  }
  int t = 0;
  if constexpr (kTensors > 1) {
    for (int last = args.tensors; last - t > 1;) {  // the last tensor that begins at or before it
      const int middle = (t + last) / 2;
      (args.first_block[middle] <= static_cast<int>(blockIdx.x) ? t : last) = middle;
    }
  }
  if (p.device_step) __syncthreads();
  const OptimFactors f = p.device_step ? shared : p.factors;
  const std::int64_t first =
      (static_cast<std::int64_t>(blockIdx.x) - args.first_block[t]) * p.elements;
  const std::int64_t last = min(args.size[t], first + p.elements);
  T* param = static_cast<T*>(args.param[t]);
  const T* grad = static_cast<const T*>(args.grad[t]);
  S *m_all = static_cast<S*>(args.m[t]), *v_all = static_cast<S*>(args.v[t]);
  const float rate = p.lr, decay = p.weight_decay;
  // loads of all of them first; registers of more would leave too few threads
  constexpr int kAtOnce = kV == 1 || (!kStates && sizeof(T) == 2) ? 4 : sizeof(T) == 4 ? 2 : 1;
#pragma unroll(kAtOnce == 1 ? 2 : 1)
  for (std::int64_t i = first + threadIdx.x * kV; i < last; i += kAtOnce * 256 * kV) {
    using Held = OptimHeld<T, kV>;
    using HeldState = OptimHeld<S, kV>;
    Held x_in[kAtOnce], g_in[kAtOnce];
    HeldState m_in[kAtOnce] = {}, v_in[kAtOnce] = {};
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const std::int64_t at = i + u * 256 * kV;
      if (at >= last) break;
      x_in[u] = *reinterpret_cast<const Held*>(param + at);
      g_in[u] = *reinterpret_cast<const Held*>(grad + at);
      if (kStates && m_all) m_in[u] = *reinterpret_cast<const HeldState*>(m_all + at);
      if (kStates && v_all) v_in[u] = *reinterpret_cast<const HeldState*>(v_all + at);
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const std::int64_t at = i + u * 256 * kV;
      if (at >= last) break;
      float x[kV], g[kV], m[kV], v[kV];
      widen<T, kV>(x_in[u], x), widen<T, kV>(g_in[u], g);
      if constexpr (kStates) widen<S, kV>(m_in[u], m), widen<S, kV>(v_in[u], v);
#pragma unroll
      for (int j = 0; j < kV; ++j) {
        if constexpr (kStates) {
          optim_element(p, f, x[j], g[j], m[j], v[j]);
        } else {  // as optim_element, without a test an element
          x[j] -= rate * (g[j] + decay * x[j]);
        }
      }
      store_vec<T, kV>(param + at, x);
      if (kStates && m_all) store_vec<S, kV>(m_all + at, m);
      if (kStates && v_all) store_vec<S, kV>(v_all + at, v);
    }
  }
}

}  // namespace rm::cuda_ops
