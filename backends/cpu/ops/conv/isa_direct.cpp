// Tiles of a direct convolution: sums stay in registers over all taps and channels; x is broadcast,
// weights are read in order.
#include "ops/conv/activation.hpp"
#include "ops/conv/direct_kernels.hpp"

namespace rm::cpu::conv::RM_ISA {
namespace {

using namespace rm::cpu::RM_ISA;

constexpr int kVectors = RM_ISA_LEVEL >= 2 ? 4 : 2;  // 24 of 32 registers, 12 of 16

template <class T, int kPixels, int kPanel>
void tile(const Tile& t) {
  vf sum[kPixels][kPanel];
  for (int p = 0; p < kPixels; ++p) {
    for (int v = 0; v < kPanel; ++v) sum[p][v] = vf{};
  }
  const float* w = t.weights;
  for (int64_t tap = 0; tap < t.num_taps; ++tap) {
    const T* x[kPixels];
    for (int p = 0; p < kPixels; ++p) {
      x[p] = static_cast<const T*>(t.taps[tap * kPixels + p]);
    }
    for (int64_t c = 0; c < t.channels; ++c, w += kPanel * kWidth) {
      vf weight[kPanel];
#pragma GCC unroll 4
      for (int v = 0; v < kPanel; ++v) weight[v] = vload(w + v * kWidth);
#pragma GCC unroll 6
      for (int p = 0; p < kPixels; ++p) {
        const vf value = vset(widen(x[p][c]));
#pragma GCC unroll 4
        for (int v = 0; v < kPanel; ++v) sum[p][v] += value * weight[v];
      }
    }
  }
  for (int p = 0; p < kPixels; ++p) {
    for (int v = 0; v < kPanel; ++v) vstore(t.sums + (p * kPanel + v) * kWidth, sum[p][v]);
  }
}

template <class T>
void depthwise(const void* const* taps, const float* weights, int64_t stride, int64_t num_taps,
               int64_t channels, float* sums) {
  int64_t c = 0;
  for (; c + 4 * kWidth <= channels; c += 4 * kWidth) {
    vf sum[4] = {};
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      const T* x = static_cast<const T*>(taps[tap]) + c;
      const float* w = weights + tap * stride + c;
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) sum[v] += vload(x + v * kWidth) * vload(w + v * kWidth);
    }
    for (int v = 0; v < 4; ++v) vstore(sums + c + v * kWidth, sum[v]);
  }
  for (; c + kWidth <= channels; c += kWidth) {
    vf sum{};
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      sum += vload(static_cast<const T*>(taps[tap]) + c) * vload(weights + tap * stride + c);
    }
    vstore(sums + c, sum);
  }
  for (; c < channels; ++c) {
    float sum = 0;
    for (int64_t tap = 0; tap < num_taps; ++tap) {
      sum += widen(static_cast<const T*>(taps[tap])[c]) * weights[tap * stride + c];
    }
    sums[c] = sum;
  }
}

template <class T>
void finish(const Finish& f) {
  const T* bias = static_cast<const T*>(f.bias);
  const T* residual = static_cast<const T*>(f.residual);
  T* y = static_cast<T*>(f.y);
  int64_t c = 0;
  for (; c + kWidth <= f.channels; c += kWidth) {
    vf v = vload(f.sums + c);
    if (bias) v += vload(bias + c);
    if (residual) v += vload(residual + c);
    vstore(y + c, activate(f.activation, v));
  }
  const int64_t rest = f.channels - c;
  if (rest == 0) return;
  vf v = vload_part(f.sums + c, rest);
  if (bias) v += vload_part(bias + c, rest);
  if (residual) v += vload_part(residual + c, rest);
  vstore_part(y + c, activate(f.activation, v), rest);
}

template <class T>
constexpr DirectKernels kernels() {
  return {{tile<T, kTilePixels, 1>, tile<T, kTilePixels, 2>,
#if RM_ISA_LEVEL >= 2
           tile<T, kTilePixels, 3>, tile<T, kTilePixels, 4>
#else
           nullptr, nullptr
#endif
          },
          {tile<T, 1, 1>, tile<T, 1, 2>,
#if RM_ISA_LEVEL >= 2
           tile<T, 1, 3>, tile<T, 1, 4>
#else
           nullptr, nullptr
#endif
          },
          depthwise<T>,
          finish<T>};
}

}  // namespace

extern const DirectSet direct_set;
const DirectSet direct_set = {kWidth, kVectors, kernels<float>(), kernels<bf16>(), kernels<f16>()};

}  // namespace rm::cpu::conv::RM_ISA
