// Depthwise convolutions of channels-last tensors in vectors: a thread has kPlaces neighbouring
// places of 16 bytes of channels, the block's weights lie in shared memory. The weights' gradient:
// a thread sums kDepthwiseTaps taps of four channels over its share of the places. Bound: loads.
#pragma once

#include "_shim/words_shim.cuh"
#include "conv2d/kernels/conv2d_naive_any.cuh"

namespace rm::cuda_ops {

/// A unit is `length` neighbouring places of a line; `lanes` threads (a power of two) lie along the
/// channels, the others of a block have units of their own.
struct ConvUnits {
  int units, length, lanes;
  FastDivisor by_segments, by_oh;  // units of a line, lines of an image
};
struct ConvUnit {
  int n, oh, ow;
};
__device__ __forceinline__ ConvUnit conv_unit(const ConvUnits& u, int unit) {
  const std::uint32_t line = u.by_segments.quotient(unit), n = u.by_oh.quotient(line);
  return {static_cast<int>(n), static_cast<int>(line - n * u.by_oh.d),
          static_cast<int>(unit - line * u.by_segments.d) * u.length};
}

inline constexpr int kDepthwisePlaces = 4, kDepthwiseMaxTaps = 64;

/// The weights of the block's channels in shared memory: [taps][lanes * vector].
template <class T>
__device__ __forceinline__ const T* conv_share_weights(const ConvArgs& p, const ConvUnits& u,
                                                       unsigned char* room) {
  T* weights = reinterpret_cast<T*>(room);
  const int width = u.lanes * kVec<T>, first = static_cast<int>(blockIdx.y) * width;
  const int taps = p.kh * p.kw;
  for (int i = threadIdx.x; i < taps * width; i += 256) {
    const int tap = i / width, c = first + i - tap * width;
    if (c < p.groups) {
      weights[i] = static_cast<const T*>(
          p.w)[c * p.w_group + tap / p.kw * p.w_stride[2] + tap % p.kw * p.w_stride[3]];
    }
  }
  __syncthreads();
  return weights;
}

/// A line's kColumns neighbouring columns from w0 on, `stride` apart; zeros outside the image.
template <class Words, int kColumns, class T>
__device__ __forceinline__ void conv_read_columns(const T* line, std::int64_t stride, bool inside,
                                                  int w0, int wd, Words (&in)[kColumns]) {
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    in[j] = Words{};
    if (inside && static_cast<unsigned>(w0 + j) < wd) {
      in[j] = *reinterpret_cast<const Words*>(line + (w0 + j) * stride);
    }
  }
}

/// A thread's places of channels from `c` on.
template <class T>
__device__ __forceinline__ void conv_store_places(const ConvArgs& p, const ConvUnit& at, int c,
                                                  float (&sum)[kDepthwisePlaces][kVec<T>]) {
#pragma unroll
  for (int q = 0; q < kDepthwisePlaces; ++q) {
    if (at.ow + q < p.ow) {
      conv_store<T, kVec<T>>(p, sum[q], conv_offset(p.y_stride, at.n, c, at.oh, at.ow + q), c);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(256)
    conv2d_depthwise_vectors(const __grid_constant__ ConvArgs p,
                             const __grid_constant__ ConvUnits u) {
  constexpr int V = kVec<T>;
  extern __shared__ __align__(16) unsigned char conv_weights[];
  overlap_begin();
  const T* weights = conv_share_weights<T>(p, u, conv_weights);
  const int width = u.lanes * V, first = static_cast<int>(blockIdx.y) * width;
  const int lane = static_cast<int>(threadIdx.x) & (u.lanes - 1), c = first + lane * V;
  const int unit = static_cast<int>(blockIdx.x) * (256 / u.lanes) + threadIdx.x / u.lanes;
  if (unit >= u.units || c >= p.groups) return;
  const ConvUnit at = conv_unit(u, unit);
  const T* image = static_cast<const T*>(p.x) + at.n * p.x_stride[0] + c;
  float sum[kDepthwisePlaces][V] = {};
  for (int kh = 0; kh < p.kh; ++kh) {
    const int h = conv_place(p.map, 0, at.oh, kh, p.h);
    if (h < 0) continue;
    const T* line = image + h * p.x_stride[2];
#pragma unroll 3
    for (int kw = 0; kw < p.kw; ++kw) {
      uint4 in[kDepthwisePlaces];
#pragma unroll
      for (int q = 0; q < kDepthwisePlaces; ++q) {
        const int column = conv_place(p.map, 1, at.ow + q, kw, p.wd);
        in[q] = make_uint4(0, 0, 0, 0);
        if (column >= 0) {
          in[q] = *reinterpret_cast<const uint4*>(line + column * p.x_stride[3]);
        }
      }
      float w[V];
      unpack<T>(*reinterpret_cast<const uint4*>(weights + (kh * p.kw + kw) * width + lane * V), w);
#pragma unroll
      for (int q = 0; q < kDepthwisePlaces; ++q) {
        float v[V];
        unpack<T>(in[q], v);
#pragma unroll
        for (int j = 0; j < V; ++j) sum[q][j] += v[j] * w[j];
      }
    }
  }
  conv_store_places<T>(p, at, c, sum);
}

/// kTaps x kTaps taps side by side, no stride: a thread reads each column of its places once.
template <class T, int kTaps>
__global__ void __launch_bounds__(256)
    conv2d_depthwise_window(const __grid_constant__ ConvArgs p,
                            const __grid_constant__ ConvUnits u) {
  constexpr int V = kVec<T>, kColumns = kDepthwisePlaces + kTaps - 1;
  extern __shared__ __align__(16) unsigned char conv_weights[];
  overlap_begin();
  const T* weights = conv_share_weights<T>(p, u, conv_weights);
  const int width = u.lanes * V, first = static_cast<int>(blockIdx.y) * width;
  const int lane = static_cast<int>(threadIdx.x) & (u.lanes - 1), c = first + lane * V;
  const int unit = static_cast<int>(blockIdx.x) * (256 / u.lanes) + threadIdx.x / u.lanes;
  if (unit >= u.units || c >= p.groups) return;
  const ConvUnit at = conv_unit(u, unit);
  const bool flip_h = p.map.step[0] < 0, flip_w = p.map.step[1] < 0;
  const int h0 = at.oh + p.map.off[0] - (flip_h ? kTaps - 1 : 0);
  const int w0 = at.ow + p.map.off[1] - (flip_w ? kTaps - 1 : 0);
  const T* image = static_cast<const T*>(p.x) + at.n * p.x_stride[0] + c;
  float sum[kDepthwisePlaces][V] = {};
#pragma unroll(kTaps == 3 ? 3 : 1)
  for (int k = 0; k < kTaps; ++k) {
    const int h = h0 + k;
    uint4 in[kColumns];
    conv_read_columns(image + h * p.x_stride[2], p.x_stride[3], static_cast<unsigned>(h) < p.h, w0,
                      p.wd, in);
    const T* line = weights + (flip_h ? kTaps - 1 - k : k) * kTaps * width + lane * V;
#pragma unroll
    for (int t = 0; t < kTaps; ++t) {
      float w[V];
      unpack<T>(*reinterpret_cast<const uint4*>(line + (flip_w ? kTaps - 1 - t : t) * width), w);
#pragma unroll
      for (int q = 0; q < kDepthwisePlaces; ++q) {
        float v[V];
        unpack<T>(in[q + t], v);
#pragma unroll
        for (int j = 0; j < V; ++j) sum[q][j] += v[j] * w[j];
      }
    }
  }
  conv_store_places<T>(p, at, c, sum);
}

inline constexpr int kDepthwiseTaps = 9, kDepthwiseChannels = 4;

/// A channel vector of dw's taps from four places of a line, 3 x 3 taps side by side, no stride.
template <class T, class Words>
__device__ __forceinline__ void conv_weight_window(
    const ConvWeightArgs& p, const T* x, const T* dy, const ConvUnit& at, int ow,
    float (&acc)[kDepthwiseTaps][kDepthwiseChannels]) {
  constexpr int V = kDepthwiseChannels, kColumns = 6;
  Words slope[4], in[3][kColumns];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    slope[q] = *reinterpret_cast<const Words*>(dy + at.n * p.dy_stride[0] + at.oh * p.dy_stride[2] +
                                               (ow + q) * p.dy_stride[3]);
  }
  const int h0 = at.oh + p.map.off[0], w0 = ow + p.map.off[1];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    conv_read_columns(x + at.n * p.x_stride[0] + (h0 + k) * p.x_stride[2], p.x_stride[3],
                      static_cast<unsigned>(h0 + k) < p.h, w0, p.wd, in[k]);
  }
  float g[4][V];
#pragma unroll
  for (int q = 0; q < 4; ++q) unpack<T>(slope[q], g[q]);
#pragma unroll
  for (int k = 0; k < 3; ++k) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      float v[V];
      unpack<T>(in[k][j], v);
#pragma unroll
      for (int t = 0; t < 3; ++t) {
        if (j < t || j - t > 3) continue;
#pragma unroll
        for (int i = 0; i < V; ++i) acc[k * 3 + t][i] += g[j - t][i] * v[i];
      }
    }
  }
}

/// kWindow: 3 x 3 taps side by side, no stride.
/// parts [gridDim.x][taps][channels]: block x has every gridDim.x-th group of units, block z the
/// taps from 9 z on.
template <class T, bool kWindow>
__global__ void __launch_bounds__(256)
    conv2d_depthwise_weight(const __grid_constant__ ConvWeightArgs p,
                            const __grid_constant__ ConvUnits u, float* parts) {
  constexpr int V = kDepthwiseChannels;
  using Words = std::conditional_t<sizeof(T) == 4, uint4, uint2>;
  __shared__ float sums[256 * V];
  const int lane = static_cast<int>(threadIdx.x) & (u.lanes - 1);
  const int slot = static_cast<int>(threadIdx.x) / u.lanes, slots = 256 / u.lanes;
  const int c = (static_cast<int>(blockIdx.y) * u.lanes + lane) * V;
  const int first = static_cast<int>(blockIdx.z) * kDepthwiseTaps, taps = p.kh * p.kw;
  float acc[kDepthwiseTaps][V] = {};
  if (c < p.groups) {
    const T* x = static_cast<const T*>(p.x) + c;
    const T* dy = static_cast<const T*>(p.dy) + c;
    const int kh0 = first / p.kw, kw0 = first - kh0 * p.kw;
    for (int unit = static_cast<int>(blockIdx.x) * slots + slot; unit < u.units;
         unit += static_cast<int>(gridDim.x) * slots) {
      const ConvUnit at = conv_unit(u, unit);
      const int end = min(p.ow, at.ow + u.length);
      int ow = at.ow;
      if constexpr (kWindow) {
        for (; ow + 4 <= end; ow += 4) conv_weight_window<T, Words>(p, x, dy, at, ow, acc);
      }
#pragma unroll 1
      for (; ow < end; ++ow) {
        const Words slope = *reinterpret_cast<const Words*>(
            dy + at.n * p.dy_stride[0] + at.oh * p.dy_stride[2] + ow * p.dy_stride[3]);
        Words in[kDepthwiseTaps];
        const int h0 = at.oh * p.map.mul[0] + p.map.off[0];
        const int w0 = ow * p.map.mul[1] + p.map.off[1];
        int kh = kh0, kw = kw0;
#pragma unroll
        for (int t = 0; t < kDepthwiseTaps; ++t) {
          const int h = h0 + kh * p.map.step[0], w = w0 + kw * p.map.step[1];
          const bool inside =
              first + t < taps && static_cast<unsigned>(h) < p.h && static_cast<unsigned>(w) < p.wd;
          in[t] = Words{};
          if (inside) {
            in[t] = *reinterpret_cast<const Words*>(x + at.n * p.x_stride[0] + h * p.x_stride[2] +
                                                    w * p.x_stride[3]);
          }
          if (++kw == p.kw) kw = 0, ++kh;
        }
        float g[V];
        unpack<T>(slope, g);
#pragma unroll
        for (int t = 0; t < kDepthwiseTaps; ++t) {
          float v[V];
          unpack<T>(in[t], v);
#pragma unroll
          for (int j = 0; j < V; ++j) acc[t][j] += g[j] * v[j];
        }
      }
    }
  }
  const int width = u.lanes * V, base = static_cast<int>(blockIdx.y) * width;
#pragma unroll
  for (int t = 0; t < kDepthwiseTaps; ++t) {
    if (first + t >= taps) break;
    if (t > 0) __syncthreads();
#pragma unroll
    for (int j = 0; j < V; ++j) sums[slot * width + lane * V + j] = acc[t][j];
    __syncthreads();
    for (int i = threadIdx.x; i < width; i += 256) {
      float sum = 0.0f;
      for (int s = 0; s < slots; ++s) sum += sums[s * width + i];
      if (base + i < p.groups) {
        parts[(static_cast<std::int64_t>(blockIdx.x) * taps + first + t) * p.groups + base + i] =
            sum;
      }
    }
  }
}

/// dw (any strides) from the parts: 32 weights by 8 lanes a block.
template <class T>
__global__ void __launch_bounds__(256)
    conv2d_depthwise_finish(const __grid_constant__ ConvWeightArgs p, const float* parts,
                            int splits) {
  __shared__ float sums[8][32];
  const int all = p.kh * p.kw * p.groups, i = static_cast<int>(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0.0f;
  if (i < all) {
#pragma unroll 8
    for (int s = threadIdx.y; s < splits; s += 8)
      sum += parts[static_cast<std::int64_t>(s) * all + i];
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || i >= all) return;
#pragma unroll
  for (int r = 1; r < 8; ++r) sum += sums[r][threadIdx.x];
  const int tap = i / p.groups, c = i - tap * p.groups;
  static_cast<T*>(p.dw)[conv_offset(p.dw_stride, c, 0, tap / p.kw, tap % p.kw)] =
      from_float<T>(sum);
}

}  // namespace rm::cuda_ops
