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

/// x P(x) = max(x, 0) - |x| P(-|x|) of both gelus, by a polynomial for log2 P(-z): one special
/// function. P is within 2^-9.8 of itself up to z = 5 (tanh: 4.5), the negative tail too; kFine:
/// 2^-12 up to 5.5 (tanh: 4.5). Beyond, what is off is below 1e-6. NaN stays; -infinity gives 0.
template <bool kTanh, bool kFine>
__device__ __forceinline__ float gelu_fast(float x) {
  float z, positive, q;
  asm("min.NaN.f32 %0, %1, 0f41200000;" : "=f"(z) : "f"(fabsf(x)));  // 10: the polynomials turn
  asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(positive) : "f"(x));
  if constexpr (kTanh && kFine) {
    q = 3.4286406e-4f * z - 4.5285809e-3f;
    q = q * z + 1.5059994e-2f;
    q = q * z - 5.300423e-2f;
    q = q * z - 4.6475714e-1f;
    q = q * z - 1.14775f;
    q = q * z - 1.0002601f;
  } else if constexpr (kTanh) {
    q = -7.2468344e-3f * z - 2.8030884e-3f;
    q = q * z - 5.1496726e-1f;
    q = q * z - 1.1302518f;
    q = q * z - 1.0008896f;
  } else if constexpr (kFine) {
    q = -2.33252155e-4f * z + 4.86980497e-3f;
    q = q * z - 4.45992832e-2f;
    q = q * z - 4.69680205e-1f;
    q = q * z - 1.14626189f;
    q = q * z - 1.00035873f;
  } else {
    q = 1.97084e-3f * z - 3.202941e-2f;
    q = q * z - 4.9181036e-1f;
    q = q * z - 1.13274374f;
    q = q * z - 1.00166086f;
  }
  return positive - z * exp2_fast(q);
}

/// activate<true> without the care for denormals, which 16-bit results do not need.
template <bool kFine>
__device__ __forceinline__ float activate_fast(Activation kind, float x, float slope) {
  constexpr float kLog2E = 1.44269504088896340736f;
  switch (kind) {
    case Activation::gelu:
      return gelu_fast<false, kFine>(x);
    case Activation::gelu_tanh:
      return gelu_fast<true, kFine>(x);
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

/// kFine: for 11 bits of mantissa rather than 8.
template <Activation kKind, int kCount, bool kFine>
__device__ __forceinline__ void activate_all(float* v, float slope) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = activate_fast<kFine>(kKind, v[i], slope);
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
