// Activations and their slopes for results of 16 bits: two special-function instructions an
// element, no care for denormals.
#pragma once

#include "_shim/epilogue_shim.cuh"

namespace rm::cuda_ops {

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// activate<true> without the care for denormals, which 16-bit results do not need.
__device__ __forceinline__ float activate_fast(Activation kind, float x, float slope) {
  constexpr float kLog2E = 1.44269504088896340736f;
  switch (kind) {
    case Activation::gelu: {  // as normal_cdf<true>
      const float t = reciprocal_fast(1.0f + 0.3275911f * 0.70710678118654752440f * fabsf(x));
      float p = 0.5f * 1.061405429f;
      p = p * t - 0.5f * 1.453152027f;
      p = p * t + 0.5f * 1.421413741f;
      p = p * t - 0.5f * 0.284496736f;
      p = p * t + 0.5f * 0.254829592f;
      const float tail = p * t * exp2_fast(x * x * (-0.5f * kLog2E));
      return x * (x < 0.0f ? tail : 1.0f - tail);
    }
    case Activation::gelu_tanh:
      return x * reciprocal_fast(1.0f + exp2_fast(-kLog2E * gelu_tanh_argument(x)));
    case Activation::silu:
      return x * reciprocal_fast(1.0f + exp2_fast(-kLog2E * x));
    case Activation::sigmoid:
      return reciprocal_fast(1.0f + exp2_fast(-kLog2E * x));
    case Activation::tanh: {
      float y;
      asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
      return y;
    }
    default:
      return activate<true>(static_cast<int>(kind), x, slope);
  }
}

template <Activation kKind, int kCount>
__device__ __forceinline__ void activate_all(float* v, float slope) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = activate_fast(kKind, v[i], slope);
}

/// d activation / d x for 16-bit results.
__device__ __forceinline__ float slope_fast(Activation kind, float x, float slope) {
  constexpr float kLog2E = 1.44269504088896340736f;
  switch (kind) {
    case Activation::gelu: {
      const float t = reciprocal_fast(1.0f + 0.3275911f * 0.70710678118654752440f * fabsf(x));
      float p = 0.5f * 1.061405429f;
      p = p * t - 0.5f * 1.453152027f;
      p = p * t + 0.5f * 1.421413741f;
      p = p * t - 0.5f * 0.284496736f;
      p = p * t + 0.5f * 0.254829592f;
      const float e = exp2_fast(x * x * (-0.5f * kLog2E)), tail = p * t * e;
      return (x < 0.0f ? tail : 1.0f - tail) + x * (0.39894228040143267794f * e);
    }
    case Activation::gelu_tanh: {
      const float s = reciprocal_fast(1.0f + exp2_fast(-kLog2E * gelu_tanh_argument(x)));
      return s + x * s * (1.0f - s) * (1.59576912160573071176f + 0.21406988854f * x * x);
    }
    case Activation::silu: {
      const float s = reciprocal_fast(1.0f + exp2_fast(-kLog2E * x));
      return s * (1.0f + x * (1.0f - s));
    }
    default:
      return activate_slope<true>(static_cast<int>(kind), x, slope);
  }
}

/// d[i] *= activation'(x[i]); the kind is looked at once.
template <bool kHalf, int kCount>
__device__ __forceinline__ void multiply_slopes(int kind, float (&d)[kCount],
                                                const float (&x)[kCount], float slope) {
  const auto all = [&](auto one) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[i] *= one(x[i]);
  };
  switch (static_cast<Activation>(kHalf ? kind : 0)) {
    case Activation::gelu:
      all([](float v) { return slope_fast(Activation::gelu, v, 0.0f); });
      break;
    case Activation::gelu_tanh:
      all([](float v) { return slope_fast(Activation::gelu_tanh, v, 0.0f); });
      break;
    case Activation::silu:
      all([](float v) { return slope_fast(Activation::silu, v, 0.0f); });
      break;
    case Activation::relu:
      all([](float v) { return v > 0.0f ? 1.0f : 0.0f; });
      break;
    default:
      all([=](float v) { return activate_slope<kHalf>(kind, v, slope); });
  }
}

}  // namespace rm::cuda_ops
