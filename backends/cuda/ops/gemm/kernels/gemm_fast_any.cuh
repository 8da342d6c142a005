// Activations and their slopes for results of 16 bits: two special-function instructions an
// element, no care for denormals.
#pragma once

#include <type_traits>

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

/// Both gelus of x = 2 h: x P(x) = h + |h| (1 - 2 P(-|x|)), by a polynomial in |h| for
/// log2 2 P(-|x|): one special function. P is within 2^-13 of itself (tanh for bfloat16: 2^-9.9) up
/// to |x| = 4, the negative tail too; what is off beyond is below 3e-7. The leading coefficients
/// are negative, so P(-|x|) ends at 0, and -infinity becomes NaN, infinity stays, as torch has it.
template <bool kTanh, bool kFine>
__device__ __forceinline__ float gelu_of_twice(float h) {
  const float z = fabsf(h);
  float q;
  if constexpr (kTanh && kFine) {
    q = -0.0057165668f * z + 0.068117958f;
    q = q * z - 0.29240108f;
    q = q * z + 0.47676301f;
    q = q * z - 0.62032572f;
    q = q * z - 1.7794166f;
    q = q * z - 2.3081174f;
    q = q * z + 9.905e-05f;
  } else if constexpr (kTanh) {
    q = -0.11594935f * z - 0.022424707f;
    q = q * z - 2.059869f;
    q = q * z - 2.2605036f;
    q = q * z - 0.0008896f;
  } else {
    q = -0.0099866797f * z + 0.091895454f;
    q = q * z - 0.38359557f;
    q = q * z - 1.8580692f;
    q = q * z - 2.297978f;
    q = q * z - 0.0001344f;
  }
  return fmaf(z, 1.0f - exp2_fast(q), h);
}

/// activate<true> without the care for denormals, which 16-bit results do not need.
template <bool kFine>
__device__ __forceinline__ float activate_fast(Activation kind, float x, float slope) {
  constexpr float kLog2E = 1.44269504088896340736f;
  switch (kind) {
    case Activation::gelu:
      return gelu_of_twice<false, kFine>(0.5f * x);
    case Activation::gelu_tanh:
      return gelu_of_twice<true, kFine>(0.5f * x);
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

/// The same of values of which gelus come halved.
template <Activation kKind, int kCount, bool kFine>
__device__ __forceinline__ void activate_halves(float* v) {
  if constexpr (kKind == Activation::gelu || kKind == Activation::gelu_tanh) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      v[i] = gelu_of_twice<kKind == Activation::gelu_tanh, kFine>(v[i]);
    }
  } else {
    activate_all<kKind, kCount, kFine>(v, 0.0f);
  }
}

/// The kind is looked at once.
template <class T, int kCount>
__device__ __forceinline__ void activate_kind(const EpilogueArgs& e, float (&v)[kCount]) {
  constexpr bool kFine = std::is_same_v<T, __half>;
  switch (static_cast<Activation>(e.activation)) {
    case Activation::none:
      return;
    case Activation::relu:
      return activate_all<Activation::relu, kCount, kFine>(v, 0.0f);
    case Activation::leaky_relu:
      return activate_all<Activation::leaky_relu, kCount, kFine>(v, e.slope);
    case Activation::gelu:
      return activate_all<Activation::gelu, kCount, kFine>(v, 0.0f);
    case Activation::gelu_tanh:
      return activate_all<Activation::gelu_tanh, kCount, kFine>(v, 0.0f);
    case Activation::silu:
      return activate_all<Activation::silu, kCount, kFine>(v, 0.0f);
    case Activation::tanh:
      return activate_all<Activation::tanh, kCount, kFine>(v, 0.0f);
    case Activation::sigmoid:
      return activate_all<Activation::sigmoid, kCount, kFine>(v, 0.0f);
  }
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
