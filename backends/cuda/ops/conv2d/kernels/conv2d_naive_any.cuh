// A thread an output element, a block a weight's gradient. Any strides, groups, sizes. Bound:
// loads.
#pragma once

#include "_shim/epilogue_shim.cuh"
#include "_shim/launch_shim.hpp"
#include "_shim/words_shim.cuh"
#include "conv2d/kernels/conv2d_args.hpp"

namespace rm::cuda_ops {

/// Where tap t of output place q reads along an axis of `size`; -1 outside.
__device__ __forceinline__ int conv_place(const ConvMap& m, int axis, int q, int t, int size) {
  int at = q * m.mul[axis] + m.off[axis] + t * m.step[axis];
  if (at < 0) return -1;
  if (m.div[axis] != 1) {
    const int quotient = at / m.div[axis];
    if (quotient * m.div[axis] != at) return -1;
    at = quotient;
  }
  return at < size ? at : -1;
}

/// kV elements at y's offset `at`, channels from `channel`: bias, aux, activation, residual (or that
/// before the activation).
template <class T, int kV>
__device__ __forceinline__ void conv_store(const ConvArgs& p, float (&v)[kV], std::int64_t at,
                                           int channel) {
  if (p.bias) {
    float bias[kV];
    load_vec<T, kV>(static_cast<const T*>(p.bias) + channel, bias);
#pragma unroll
    for (int j = 0; j < kV; ++j) v[j] += bias[j];
  }
  const auto add_residual = [&] {
    float r[kV];
    load_vec<T, kV>(static_cast<const T*>(p.residual) + at, r);
#pragma unroll
    for (int j = 0; j < kV; ++j) v[j] += r[j];
  };
  if (p.residual && p.residual_first) add_residual();
  if (p.aux) store_vec<T, kV>(static_cast<T*>(p.aux) + at, v);
  if (p.activation == static_cast<int>(Activation::relu)) {  // without a switch an element
#pragma unroll
    for (int j = 0; j < kV; ++j) v[j] = v[j] < 0.0f ? 0.0f : v[j];
  } else if (p.activation == kConvHardswish) {
#pragma unroll
    for (int j = 0; j < kV; ++j) {  // NaN stays
      const float gate = v[j] <= -3.0f ? 0.0f : v[j] >= 3.0f ? 6.0f : v[j] + 3.0f;
      v[j] *= gate * (1.0f / 6.0f);
    }
  } else if (p.activation != static_cast<int>(Activation::none)) {
#pragma unroll
    for (int j = 0; j < kV; ++j) v[j] = activate<sizeof(T) == 2>(p.activation, v[j], p.slope);
  }
  if (p.residual && !p.residual_first) add_residual();
  store_vec<T, kV>(static_cast<T*>(p.y) + at, v);
}

struct ConvPlace {
  int n, o, h, w;  // o: channel over all groups
};
/// Output element `i` in the order of y's memory.
__device__ __forceinline__ ConvPlace conv_output(const ConvArgs& p, std::int64_t i) {
  const int channels = p.groups * p.out;
  ConvPlace at;
  if (p.channels_last) {
    at.o = static_cast<int>(i % channels), i /= channels;
    at.w = static_cast<int>(i % p.ow), i /= p.ow;
    at.h = static_cast<int>(i % p.oh), at.n = static_cast<int>(i / p.oh);
  } else {
    at.w = static_cast<int>(i % p.ow), i /= p.ow;
    at.h = static_cast<int>(i % p.oh), i /= p.oh;
    at.o = static_cast<int>(i % channels), at.n = static_cast<int>(i / channels);
  }
  return at;
}
__device__ __forceinline__ std::int64_t conv_offset(const std::int64_t (&s)[4], int n, int c, int h,
                                                    int w) {
  return n * s[0] + c * s[1] + h * s[2] + w * s[3];
}

template <class T>
__global__ void __launch_bounds__(256) conv2d_naive(const __grid_constant__ ConvArgs p) {
  overlap_begin();
  const std::int64_t total = static_cast<std::int64_t>(p.n) * p.groups * p.out * p.oh * p.ow;
  const std::int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= total) return;
  const ConvPlace at = conv_output(p, i);
  const int g = at.o / p.out;
  const T* x = static_cast<const T*>(p.x);
  const T* w = static_cast<const T*>(p.w) + g * p.w_group + (at.o - g * p.out) * p.w_stride[0];
  float sum[1] = {0.0f};
  for (int kh = 0; kh < p.kh; ++kh) {
    const int h = conv_place(p.map, 0, at.h, kh, p.h);
    if (h < 0) continue;
    for (int kw = 0; kw < p.kw; ++kw) {
      const int col = conv_place(p.map, 1, at.w, kw, p.wd);
      if (col < 0) continue;
      const T* from = x + conv_offset(p.x_stride, at.n, g * p.in, h, col);
      const T* tap = w + kh * p.w_stride[2] + kw * p.w_stride[3];
#pragma unroll 4
      for (int c = 0; c < p.in; ++c) {
        sum[0] += to_float(from[c * p.x_stride[1]]) * to_float(tap[c * p.w_stride[1]]);
      }
    }
  }
  conv_store<T, 1>(p, sum, conv_offset(p.y_stride, at.n, at.o, at.h, at.w), at.o);
}

/// One input and one output channel a group.
template <class T>
__global__ void __launch_bounds__(256) conv2d_depthwise(const __grid_constant__ ConvArgs p) {
  overlap_begin();
  const std::int64_t total = static_cast<std::int64_t>(p.n) * p.groups * p.oh * p.ow;
  const std::int64_t i = blockIdx.x * 256ll + threadIdx.x;
  if (i >= total) return;
  const ConvPlace at = conv_output(p, i);
  float sum[1] = {};
  for (int kh = 0; kh < p.kh; ++kh) {
    const int h = conv_place(p.map, 0, at.h, kh, p.h);
    if (h < 0) continue;
#pragma unroll 3
    for (int kw = 0; kw < p.kw; ++kw) {
      const int col = conv_place(p.map, 1, at.w, kw, p.wd);
      if (col < 0) continue;
      sum[0] += to_float(static_cast<const T*>(p.x)[conv_offset(p.x_stride, at.n, at.o, h, col)]) *
                to_float(static_cast<const T*>(
                    p.w)[at.o * p.w_group + kh * p.w_stride[2] + kw * p.w_stride[3]]);
    }
  }
  conv_store<T, 1>(p, sum, conv_offset(p.y_stride, at.n, at.o, at.h, at.w), at.o);
}

/// A block a weight: its 256 threads' sums are added in a fixed order.
template <class T>
__global__ void __launch_bounds__(256)
    conv2d_weight_naive(const __grid_constant__ ConvWeightArgs p) {
  const std::int64_t total = static_cast<std::int64_t>(p.groups) * p.out * p.in * p.kh * p.kw;
  for (std::int64_t i = blockIdx.x; i < total; i += gridDim.x) {
    std::int64_t rest = i;
    const int kw = static_cast<int>(rest % p.kw);
    rest /= p.kw;
    const int kh = static_cast<int>(rest % p.kh);
    rest /= p.kh;
    const int c = static_cast<int>(rest % p.in), o = static_cast<int>(rest / p.in);
    const int channel = o / p.out * p.in + c;
    float sum = 0.0f;
    const std::int64_t places = static_cast<std::int64_t>(p.n) * p.oh * p.ow;
    for (std::int64_t j = threadIdx.x; j < places; j += 256) {
      const int ow = static_cast<int>(j % p.ow), oh = static_cast<int>(j / p.ow % p.oh);
      const int n = static_cast<int>(j / p.ow / p.oh);
      const int h = conv_place(p.map, 0, oh, kh, p.h), w = conv_place(p.map, 1, ow, kw, p.wd);
      if (h < 0 || w < 0) continue;
      sum += to_float(static_cast<const T*>(p.dy)[conv_offset(p.dy_stride, n, o, oh, ow)]) *
             to_float(static_cast<const T*>(p.x)[conv_offset(p.x_stride, n, channel, h, w)]);
    }
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) {
      static_cast<T*>(p.dw)[conv_offset(p.dw_stride, o, c, kh, kw)] = from_float<T>(sum);
    }
  }
}

/// dbias: 32 neighbouring channels by 8 lanes a block, `splits` blocks along the places; their
/// parts [splits][channels] are added by conv2d_bias_finish.
template <class T>
__global__ void __launch_bounds__(256)
    conv2d_bias_parts(const __grid_constant__ ConvWeightArgs p, float* parts) {
  __shared__ float sums[8][33];
  const int channels = p.groups * p.out, o = blockIdx.x * 32 + threadIdx.x;
  const std::int64_t places = static_cast<std::int64_t>(p.n) * p.oh * p.ow;
  const std::int64_t share = (places + gridDim.y - 1) / gridDim.y;
  const std::int64_t last = min(places, share * (blockIdx.y + 1));
  float sum = 0.0f;
  if (o < channels) {
#pragma unroll 4
    for (std::int64_t j = share * blockIdx.y + threadIdx.y; j < last; j += 8) {
      const int ow = static_cast<int>(j % p.ow), oh = static_cast<int>(j / p.ow % p.oh);
      const int n = static_cast<int>(j / p.ow / p.oh);
      sum += to_float(static_cast<const T*>(p.dy)[conv_offset(p.dy_stride, n, o, oh, ow)]);
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || o >= channels) return;
#pragma unroll
  for (int r = 1; r < 8; ++r) sum += sums[r][threadIdx.x];
  parts[static_cast<std::int64_t>(blockIdx.y) * channels + o] = sum;
}
/// The same of dense places, channels last: 32 vectors of channels by 8 lanes, four loads of a
/// thread under way.
template <class T>
__global__ void __launch_bounds__(256)
    conv2d_bias_vectors(const T* dy, std::int64_t places, int channels, float* parts) {
  constexpr int V = kVec<T>, kLoads = 4;
  __shared__ float sums[8][32 * V];
  const int c = (static_cast<int>(blockIdx.x) * 32 + threadIdx.x) * V;
  const std::int64_t share = (places + gridDim.y - 1) / gridDim.y;
  const std::int64_t last = min(places, share * (blockIdx.y + 1));
  float sum[V] = {};
  if (c < channels) {
#pragma unroll 1
    for (std::int64_t j = share * blockIdx.y + threadIdx.y; j < last; j += 8 * kLoads) {
      uint4 w[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        w[u] = make_uint4(0, 0, 0, 0);
        if (j + u * 8 < last) {
          w[u] = *reinterpret_cast<const uint4*>(dy + (j + u * 8) * channels + c);
        }
      }
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        float v[V];
        unpack<T>(w[u], v);
#pragma unroll
        for (int k = 0; k < V; ++k) sum[k] += v[k];
      }
    }
  }
#pragma unroll
  for (int k = 0; k < V; ++k) sums[threadIdx.y][threadIdx.x * V + k] = sum[k];
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.y) * 32 + threadIdx.x; i < 32 * V; i += 256) {
    const int o = static_cast<int>(blockIdx.x) * 32 * V + i;
    if (o >= channels) break;
    float all = 0.0f;
#pragma unroll
    for (int r = 0; r < 8; ++r) all += sums[r][i];
    parts[static_cast<std::int64_t>(blockIdx.y) * channels + o] = all;
  }
}
/// 32 channels by 32 lanes a block.
template <class T>
__global__ void __launch_bounds__(1024)
    conv2d_bias_finish(const float* parts, int splits, int channels, T* dbias) {
  __shared__ float sums[32][33];
  const int o = static_cast<int>(blockIdx.x) * 32 + threadIdx.x;
  float sum = 0.0f;
  if (o < channels) {
#pragma unroll 8
    for (int s = threadIdx.y; s < splits; s += 32) {
      sum += parts[static_cast<std::int64_t>(s) * channels + o];
    }
  }
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  // a warp a channel adds its lanes
  sum = warp_reduce<Sum>(sums[threadIdx.x][threadIdx.y]);
  const int mine = static_cast<int>(blockIdx.x) * 32 + threadIdx.y;
  if (threadIdx.x == 0 && mine < channels) dbias[mine] = from_float<T>(sum);
}

}  // namespace rm::cuda_ops
