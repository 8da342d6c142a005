// The weights' gradient as a product on tensor cores: tiles of kTile output channels by kTile (tap,
// channel) pairs, depth is output places, 32 at a time by asynchronous copies. Both operands lie
// with the depth outside, so ldmatrix transposes them. Parts of the depth are added in a fixed
// order.
#pragma once

#include "conv2d/kernels/conv2d_gemm_sm80.cuh"

namespace rm::cuda_ops {

inline constexpr int kConvPlaces = 32, kConvWeightStages = 4;

template <int kTile>
constexpr int conv_weight_shared() {
  return kConvWeightStages * kConvPlaces * 2 * kTile * 2;
}

template <class T, int kTile>
__global__ void __launch_bounds__(kTile * 2)
    conv2d_weight_gemm(const __grid_constant__ ConvWeightGemmArgs p) {
  constexpr int kThreads = kTile * 2, kChunks = kTile / 8, kRowBytes = kTile * 2;
  constexpr int kRowsAtOnce = kThreads / kChunks, kRows = kConvPlaces / kRowsAtOnce;
  // 64: 2 x 2 warps of 32 x 32; 128: 2 x 4 warps of 64 x 32
  constexpr int kWarpM = kTile / 2, kTilesM = kWarpM / 16, kTilesN = 4;
  constexpr int kStage = kConvPlaces * kRowBytes * 2;
  extern __shared__ __align__(128) unsigned char conv_shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = blockIdx.z / p.splits, split = blockIdx.z % p.splits;
  const int m0 = static_cast<int>(blockIdx.x) % p.tiles_m * kTile;
  const int n0 = static_cast<int>(blockIdx.x) / p.tiles_m * kTile;
  const int chunk = threadIdx.x % kChunks, row0 = threadIdx.x / kChunks;
  const int columns = p.kh * p.kw * p.padded, column = n0 + chunk * 8, o = m0 + chunk * 8;
  const int tap = column / p.padded, channel = column - tap * p.padded;
  const int kh = tap / p.kw, kw = tap - kh * p.kw;
  const bool in_a = o < p.out_padded, in_b = column < columns;
  const T* dy = static_cast<const T*>(p.dy) + g * p.out_padded + o;
  const T* x = static_cast<const T*>(p.x) + g * p.padded + channel;
  const int first = split * p.steps_per_split, last = min(p.steps, first + p.steps_per_split);
  const std::uint32_t shared = shared_address(conv_shared);

  const auto load = [&](int stage, int step) {
    const std::uint32_t to = shared + stage * kStage;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = row0 + i * kRowsAtOnce, place = step * kConvPlaces + row;
      const bool valid = place < p.places;
      const ConvRow r = conv_row(valid ? place : 0, p.by_ow, p.by_oh);
      const std::uint32_t at = row * kRowBytes + ((chunk ^ (row & 7)) * 16);
      const T* a = dy + r.n * p.dy_stride[0] + r.h * p.dy_stride[1] + r.w * p.dy_stride[2];
      copy_16_async(to + at, valid && in_a ? a : static_cast<const T*>(p.dy), valid && in_a);
      const int h = r.h * p.map.mul[0] + p.map.off[0] + kh * p.map.step[0];
      const int w = r.w * p.map.mul[1] + p.map.off[1] + kw * p.map.step[1];
      const bool inside = valid && in_b && h >= 0 && w >= 0 && h < p.h && w < p.wd;
      const T* b = x + r.n * p.x_stride[0] + h * p.x_stride[1] + w * p.x_stride[2];
      copy_16_async(to + kStage / 2 + at, inside ? b : static_cast<const T*>(p.x), inside);
    }
  };

  float acc[kTilesM][kTilesN][4] = {};
  const int warp_m = warp % 2 * kWarpM, warp_n = warp / 2 * 32;
  const int a_place = lane / 16 * 8 + lane % 8, a_chunk = warp_m / 8 + lane / 8 % 2;
  const int b_place = lane / 8 % 2 * 8 + lane % 8, b_chunk = warp_n / 8 + lane / 16;
#pragma unroll
  for (int s = 0; s < kConvWeightStages - 1; ++s) {
    if (first + s < last) load(s, first + s);
    copy_group_end();
  }
  for (int step = first; step < last; ++step) {
    copy_groups_wait<kConvWeightStages - 2>();
    __syncthreads();
    const int ahead = step + kConvWeightStages - 1;
    if (ahead < last) load((ahead - first) % kConvWeightStages, ahead);
    copy_group_end();
    const std::uint32_t at = shared + (step - first) % kConvWeightStages * kStage;
#pragma unroll
    for (int k = 0; k < kConvPlaces / 16; ++k) {
      std::uint32_t a[kTilesM][4], b[kTilesN / 2][4];
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        const int row = k * 16 + a_place;
        load_matrix_x4_transposed(a[i],
                                  at + row * kRowBytes + (((a_chunk + i * 2) ^ (row & 7)) * 16));
      }
#pragma unroll
      for (int j = 0; j < kTilesN / 2; ++j) {
        const int row = k * 16 + b_place;
        load_matrix_x4_transposed(
            b[j], at + kStage / 2 + row * kRowBytes + (((b_chunk + j * 2) ^ (row & 7)) * 16));
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) {
          conv_mma<T>(acc[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
  }
  float* to = p.parts + (static_cast<std::int64_t>(split) * p.groups + g) * p.out * columns;
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      const int m = m0 + warp_m + i * 16 + lane / 4, n = n0 + warp_n + j * 8 + lane % 4 * 2;
      if (n >= columns) continue;  // columns is a multiple of 8
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (m + half * 8 >= p.out) continue;
        *reinterpret_cast<float2*>(to + static_cast<std::int64_t>(m + half * 8) * columns + n) =
            make_float2(acc[i][j][half * 2], acc[i][j][half * 2 + 1]);
      }
    }
  }
}

/// dw (any strides) = the parts' sum without the padded channels; a thread four channels of a tap.
template <class T>
__global__ void __launch_bounds__(256)
    conv2d_weight_finish(const __grid_constant__ ConvWeightFinishArgs p) {
  const int i = static_cast<int>(blockIdx.x * 256 + threadIdx.x) * 4;
  if (i >= p.all) return;
  const std::uint32_t row = p.by_padded.quotient(i), o = p.by_taps.quotient(row);
  const int channel = static_cast<int>(i - row * p.by_padded.d);
  const int tap = static_cast<int>(row - o * p.by_taps.d);
  float sum[4] = {};
#pragma unroll 4
  for (int s = 0; s < p.splits; ++s) {
    const float4 v =
        *reinterpret_cast<const float4*>(p.parts + static_cast<std::int64_t>(s) * p.all + i);
    sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
  }
  T* dw = static_cast<T*>(p.conv.dw);
  const auto kh = static_cast<int>(p.unfolded ? tap : p.by_kw.quotient(tap));
  if (p.vectors) {
    const int kw = tap - kh * p.conv.kw;
    store_vec<T, 4>(dw + conv_offset(p.conv.dw_stride, o, channel, kh, kw), sum);
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    int c = channel + j, kw = tap - kh * p.conv.kw;
    if (p.unfolded) kw = static_cast<int>(p.by_in.quotient(c)), c -= kw * p.conv.in;
    if (c < p.conv.in && kw < p.conv.kw)
      dw[conv_offset(p.conv.dw_stride, o, c, kh, kw)] = from_float<T>(sum[j]);
  }
}

}  // namespace rm::cuda_ops
