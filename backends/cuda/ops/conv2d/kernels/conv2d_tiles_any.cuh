// Convolution of float32 as a product by multiply-adds: tiles of kM places by kN channels, depth
// (tap by tap, all channels of a tap) in steps of kK, gathered from any strides into registers
// while the step before is summed. 16 x 16 threads have (kM / 16) x (kN / 16) sums each. Bound:
// multiply-adds and the reads of shared memory that feed them.
#pragma once

#include "conv2d/kernels/conv2d_gemm_sm80.cuh"

namespace rm::cuda_ops {

struct ConvTileArgs {
  ConvGemmArgs g;  // padded: the channels; w_stride, x_stride unused
  FastDivisor by_in, by_kw;
  int depth;
};

inline constexpr int kConvTileLoads = 4;  // of each operand a thread and step

template <int kTile>
inline constexpr int kConvTileDepth = 256 * kConvTileLoads / kTile;
template <int kTile>
constexpr int conv_tile_shared() {
  const int stages = 2 * 2 * kConvTileDepth<kTile> * (kTile + 4) * 4;
  const int result = kTile * kConvPitch<kTile> * 4;
  return stages > result ? stages : result;
}

struct ConvTap {
  int kh, kw, c;
};
__device__ __forceinline__ ConvTap conv_tap(const ConvTileArgs& p, int k) {
  const std::uint32_t tap = p.by_in.quotient(k), kh = p.by_kw.quotient(tap);
  return {static_cast<int>(kh), static_cast<int>(tap - kh * p.by_kw.d),
          static_cast<int>(k - tap * p.by_in.d)};
}

/// What neighbouring threads read: of x channels or places, of w channels; `columns`: of x places,
/// of w output channels.
enum class ConvTileOrder { channels, places, columns };

template <int kTile, ConvTileOrder kOrder>
__global__ void __launch_bounds__(256, kTile == 64 ? 3 : 1)
    conv2d_tiles(const __grid_constant__ ConvTileArgs p) {
  constexpr bool kDense = kOrder == ConvTileOrder::channels;
  constexpr bool kColumns = kOrder == ConvTileOrder::columns;
  constexpr int kK = kConvTileDepth<kTile>, kPitch = kTile + 4, kSums = kTile / 16;
  constexpr int kStage = 2 * kK * kPitch;
  extern __shared__ __align__(16) float conv_tile[];
  overlap_begin();
  const ConvGemmArgs& g = p.g;
  const ConvArgs& c = g.conv;
  const int group = static_cast<int>(blockIdx.z) / g.splits;
  const int split = static_cast<int>(blockIdx.z) % g.splits;
  const int m0 = static_cast<int>(blockIdx.x) / g.tiles_n * kTile;
  const int n0 = static_cast<int>(blockIdx.x) % g.tiles_n * kTile;
  const float* x = static_cast<const float*>(c.x) + group * c.in * c.x_stride[1];
  const float* w = static_cast<const float*>(c.w) + group * c.w_group;

  // element i of this thread: place a_row + i * a_rows, depth a_k + i * a_ks of the step
  const int a_row = kDense ? threadIdx.x / kK : threadIdx.x % kTile;
  const int a_k = kDense ? threadIdx.x % kK : threadIdx.x / kTile;
  constexpr int kRows = kDense ? kConvTileLoads : 1, kRowStep = 256 / kK, kDepthStep = 256 / kTile;
  const int b_row = kColumns ? threadIdx.x % kTile : threadIdx.x / kK;
  const int b_k = kColumns ? threadIdx.x / kTile : threadIdx.x % kK;
  constexpr int kRowStepB = kColumns ? 0 : kRowStep, kDepthStepB = kColumns ? kDepthStep : 0;
  const float* image[kRows];
  int row_h[kRows], row_w[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int m = m0 + a_row + i * kRowStep;
    const ConvRow r = conv_row(m < g.rows ? m : 0, g.by_ow, g.by_oh);
    image[i] = x + r.n * c.x_stride[0];
    row_h[i] = m < g.rows ? r.h * c.map.mul[0] + c.map.off[0] : -(1 << 30);
    row_w[i] = r.w * c.map.mul[1] + c.map.off[1];
  }
  float a[kConvTileLoads], b[kConvTileLoads];
  const auto gather = [&](const ConvTap& tap, bool inside, int row) {
    int h = row_h[row] + tap.kh * c.map.step[0], at = row_w[row] + tap.kw * c.map.step[1];
    if (h < 0 || at < 0 || !inside) return 0.0f;
    if (c.map.div[0] != 1 || c.map.div[1] != 1) {
      const int qh = h / c.map.div[0], qw = at / c.map.div[1];
      if (qh * c.map.div[0] != h || qw * c.map.div[1] != at) return 0.0f;
      h = qh, at = qw;
    }
    if (h >= c.h || at >= c.wd) return 0.0f;
    return image[row][tap.c * c.x_stride[1] + h * c.x_stride[2] + at * c.x_stride[3]];
  };
  const auto load = [&](int step) {
    const int k0 = step * kK;
    if constexpr (kDense) {
      const int k = k0 + a_k;
      const ConvTap tap = conv_tap(p, k);
#pragma unroll
      for (int i = 0; i < kConvTileLoads; ++i) a[i] = gather(tap, k < p.depth, i);
    } else {
#pragma unroll
      for (int i = 0; i < kConvTileLoads; ++i) {
        const int k = k0 + a_k + i * kDepthStep;
        a[i] = gather(conv_tap(p, k), k < p.depth, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kConvTileLoads; ++i) {
      const int k = k0 + b_k + i * kDepthStepB, n = n0 + b_row + i * kRowStepB;
      const ConvTap tap = conv_tap(p, k);
      const float* from =
          w + tap.c * c.w_stride[1] + tap.kh * c.w_stride[2] + tap.kw * c.w_stride[3];
      b[i] = k < p.depth && n < c.out ? from[n * c.w_stride[0]] : 0.0f;
    }
  };
  const auto put = [&](float* to) {
#pragma unroll
    for (int i = 0; i < kConvTileLoads; ++i) {
      to[(kDense ? a_k : a_k + i * kDepthStep) * kPitch + (kDense ? a_row + i * kRowStep : a_row)] =
          a[i];
      to[(kK + b_k + i * kDepthStepB) * kPitch + b_row + i * kRowStepB] = b[i];
    }
  };

  float acc[kSums][kSums] = {};
  const int ty = threadIdx.x / 16 * 4, tx = threadIdx.x % 16 * 4;
  const int first = split * g.steps_per_split, last = min(g.steps, first + g.steps_per_split);
  if (first < last) load(first), put(conv_tile);
  __syncthreads();
  for (int step = first; step < last; ++step) {
    const float* from = conv_tile + (step - first) % 2 * kStage;
    if (step + 1 < last) load(step + 1);
#pragma unroll
    for (int k = 0; k < kK; ++k) {
      float left[kSums], right[kSums];
#pragma unroll
      for (int i = 0; i < kSums; i += 4) {
        *reinterpret_cast<float4*>(&left[i]) =
            *reinterpret_cast<const float4*>(from + k * kPitch + ty + i * 16);
        *reinterpret_cast<float4*>(&right[i]) =
            *reinterpret_cast<const float4*>(from + (kK + k) * kPitch + tx + i * 16);
      }
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
#pragma unroll
        for (int j = 0; j < kSums; ++j) acc[i][j] += left[i] * right[j];
      }
    }
    if (step + 1 < last) put(conv_tile + (step + 1 - first) % 2 * kStage);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
#pragma unroll
    for (int j = 0; j < kSums; j += 4) {
      *reinterpret_cast<float4*>(conv_tile + (ty + i / 4 * 64 + i % 4) * kConvPitch<kTile> + tx +
                                 j * 16) =
          make_float4(acc[i][j], acc[i][j + 1], acc[i][j + 2], acc[i][j + 3]);
    }
  }
  __syncthreads();
  conv_store_tile<float, kTile, kTile, 256>(g, conv_tile, m0, n0, group, split);
}

}  // namespace rm::cuda_ops
