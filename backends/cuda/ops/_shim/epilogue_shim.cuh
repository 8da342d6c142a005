// The arithmetic of epilogue_shim.hpp: activations, their derivatives, one element of an epilogue.
#pragma once

#include "_shim/device_shim.cuh"
#include "_shim/epilogue_shim.hpp"

namespace rm::cuda_ops {

__device__ __forceinline__ float sigmoid_of(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

/// The normal distribution's cumulative probability. kHalf: for results of 16 bits, within 2e-7 by
/// Abramowitz and Stegun 7.1.26, whose exponential is the density's.
template <bool kHalf>
__device__ __forceinline__ float normal_cdf(float x) {
  if constexpr (!kHalf) return 0.5f * (1.0f + erff(x * 0.70710678118654752440f));
  const float z = fabsf(x) * 0.70710678118654752440f;
  const float t = __fdividef(1.0f, 1.0f + 0.3275911f * z);
  float p = 1.061405429f;
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const float tail = 0.5f * p * t * __expf(-z * z);
  return x < 0.0f ? tail : 1.0f - tail;
}

/// Twice the argument of gelu_tanh's tanh: 0.5 (1 + tanh(u / 2)) is sigmoid(u), without
/// cancellation.
__device__ __forceinline__ float gelu_tanh_argument(float x) {
  return 1.59576912160573071176f * (x + 0.044715f * x * x * x);
}

template <bool kHalf>
__device__ __forceinline__ float activate(int kind, float x, float slope) {
  switch (static_cast<Activation>(kind)) {
    case Activation::relu:
      return x < 0.0f ? 0.0f : x;
    case Activation::leaky_relu:
      return x < 0.0f ? x * slope : x;
    case Activation::gelu:
      return x * normal_cdf<kHalf>(x);
    case Activation::gelu_tanh:
      return x * sigmoid_of(gelu_tanh_argument(x));
    case Activation::silu:
      return __fdividef(x, 1.0f + __expf(-x));
    case Activation::tanh:
      return tanhf(x);
    case Activation::sigmoid:
      return sigmoid_of(x);
    default:
      return x;
  }
}

/// d activation / d x at x.
template <bool kHalf>
__device__ __forceinline__ float activate_slope(int kind, float x, float slope) {
  switch (static_cast<Activation>(kind)) {
    case Activation::relu:
      return x > 0.0f ? 1.0f : 0.0f;
    case Activation::leaky_relu:
      return x > 0.0f ? 1.0f : slope;
    case Activation::gelu:
      return normal_cdf<kHalf>(x) + x * 0.39894228040143267794f * __expf(-0.5f * x * x);
    case Activation::gelu_tanh: {
      const float s = sigmoid_of(gelu_tanh_argument(x));
      return s + x * s * (1.0f - s) * 1.59576912160573071176f * (1.0f + 3.0f * 0.044715f * x * x);
    }
    case Activation::silu: {
      const float s = sigmoid_of(x);
      return s * (1.0f + x * (1.0f - s));
    }
    case Activation::tanh: {
      const float t = tanhf(x);
      return 1.0f - t * t;
    }
    case Activation::sigmoid: {
      const float s = sigmoid_of(x);
      return s * (1.0f - s);
    }
    default:
      return 1.0f;
  }
}

/// kV neighbouring elements of a row, in place; writes aux where it is asked for. For kV > 1 the
/// pointers and pitches are multiples of kV elements.
template <class T, int kV>
__device__ __forceinline__ void epilogue_values(const EpilogueArgs& e, float (&v)[kV],
                                                std::int64_t batch, std::int64_t m,
                                                std::int64_t n) {
  float bias[kV] = {};
  if (e.bias_kind == static_cast<int>(BiasKind::column)) {
    load_vec<T, kV>(static_cast<const T*>(e.bias) + n, bias);
  } else if (e.bias_kind != static_cast<int>(BiasKind::none)) {
    const bool row = e.bias_kind == static_cast<int>(BiasKind::row);
    const float one = to_float(static_cast<const T*>(e.bias)[row ? m : 0]);
#pragma unroll
    for (int j = 0; j < kV; ++j) bias[j] = one;
  }
#pragma unroll
  for (int j = 0; j < kV; ++j) v[j] = v[j] * e.scale + bias[j];
  if (e.aux) {
    store_vec<T, kV>(static_cast<T*>(e.aux) + batch * e.aux_batch + m * e.aux_pitch + n, v);
  }
#pragma unroll
  for (int j = 0; j < kV; ++j) v[j] = activate<sizeof(T) == 2>(e.activation, v[j], e.slope);
  if (e.residual) {
    float r[kV];
    load_vec<T, kV>(
        static_cast<const T*>(e.residual) + batch * e.residual_batch + m * e.residual_pitch + n, r);
#pragma unroll
    for (int j = 0; j < kV; ++j) v[j] += r[j];
  }
}

/// The stored value of an element whose product is `acc`; writes aux where asked for.
template <class T>
__device__ __forceinline__ float epilogue_value(const EpilogueArgs& e, float acc,
                                                std::int64_t batch, std::int64_t m,
                                                std::int64_t n) {
  float v[1] = {acc};
  epilogue_values<T, 1>(e, v, batch, m, n);
  return v[0];
}

}  // namespace rm::cuda_ops
