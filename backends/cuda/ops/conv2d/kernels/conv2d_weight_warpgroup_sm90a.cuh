// The weights' gradient by warpgroup products: tiles of kM output channels by 128 (tap, channel)
// pairs, 64 output places of depth a stage, which lie outside in both operands: pieces of [64
// places][64 channels] in the 128-byte swizzle, which wgmma transposes. Parts of the depth are
// added in a fixed order. Bound: tensor cores, or the gathering's arithmetic.
#pragma once

#include "conv2d/kernels/conv2d_weight_sm80.cuh"
#include "conv2d/kernels/conv2d_wgmma_sm90a.cuh"

namespace rm::cuda_ops {

inline constexpr int kConvWarpgroupPlaces = 64, kConvWarpgroupStages = 3;
inline constexpr int kConvPiece = kConvWarpgroupPlaces * 128;  // bytes

template <int kM>
constexpr int conv_weight_warpgroup_shared() {
  return kConvWarpgroupStages * (kM / 64 + 2) * kConvPiece + 1024;
}

template <class T, int kM>
__global__ void __launch_bounds__(2 * kM)
    conv2d_weight_warpgroup(const __grid_constant__ ConvWeightGemmArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kN = 128, kThreads = 2 * kM, kStage = (kM / 64 + 2) * kConvPiece;
  constexpr int kChunksA = kM / 8, kChunksB = kN / 8;
  constexpr int kAtOnceA = kThreads / kChunksA, kAtOnceB = kThreads / kChunksB;
  constexpr int kPlaces = kConvWarpgroupPlaces, kStages = kConvWarpgroupStages;
  extern __shared__ __align__(128) unsigned char conv_shared[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = blockIdx.z / p.splits, split = blockIdx.z % p.splits;
  const int m0 = static_cast<int>(blockIdx.x) % p.tiles_m * kM;
  const int n0 = static_cast<int>(blockIdx.x) / p.tiles_m * kN;
  const int chunk_a = threadIdx.x % kChunksA, row_a = threadIdx.x / kChunksA;
  const int chunk_b = threadIdx.x % kChunksB, row_b = threadIdx.x / kChunksB;
  const int columns = p.kh * p.kw * p.padded, column = n0 + chunk_b * 8, o = m0 + chunk_a * 8;
  const int tap = column / p.padded, channel = column - tap * p.padded;
  const int kh = tap / p.kw, kw = tap - kh * p.kw;
  const bool in_a = o < p.out_padded, in_b = column < columns;
  const int off_h = p.map.off[0] + kh * p.map.step[0], off_w = p.map.off[1] + kw * p.map.step[1];
  const T* dy = static_cast<const T*>(p.dy) + g * p.out_padded + o;
  const T* x = static_cast<const T*>(p.x) + g * p.padded + channel;
  const int first = split * p.steps_per_split, last = min(p.steps, first + p.steps_per_split);
  const std::uint32_t shared = (shared_address(conv_shared) + 1023) & ~1023u;
  const auto at = [](int chunk, int row) -> std::uint32_t {
    return chunk / 8 * kConvPiece + row * 128 + (((chunk % 8) ^ (row & 7)) * 16);
  };

  const auto load = [&](int stage, int step) {
    const std::uint32_t to_a = shared + stage * kStage, to_b = to_a + kM / 64 * kConvPiece;
#pragma unroll
    for (int i = 0; i < kPlaces / kAtOnceA; ++i) {
      const int row = row_a + i * kAtOnceA, place = step * kPlaces + row;
      const bool valid = place < p.places && in_a;
      const ConvRow r = conv_row(valid ? place : 0, p.by_ow, p.by_oh);
      const T* a = dy + r.n * p.dy_stride[0] + r.h * p.dy_stride[1] + r.w * p.dy_stride[2];
      copy_16_async(to_a + at(chunk_a, row), valid ? a : static_cast<const T*>(p.dy), valid);
    }
#pragma unroll
    for (int i = 0; i < kPlaces / kAtOnceB; ++i) {
      const int row = row_b + i * kAtOnceB, place = step * kPlaces + row;
      const ConvRow r = conv_row(place < p.places ? place : 0, p.by_ow, p.by_oh);
      const int h = r.h * p.map.mul[0] + off_h, w = r.w * p.map.mul[1] + off_w;
      const bool valid = place < p.places && in_b &&
                         static_cast<unsigned>(h) < static_cast<unsigned>(p.h) &&
                         static_cast<unsigned>(w) < static_cast<unsigned>(p.wd);
      const T* b = x + r.n * p.x_stride[0] + h * p.x_stride[1] + w * p.x_stride[2];
      copy_16_async(to_b + at(chunk_b, row), valid ? b : static_cast<const T*>(p.x), valid);
    }
  };

  float acc[64];
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (first + s < last) load(s, first + s);
    copy_group_end();
  }
  int stage = 0, ahead = kStages - 1;
  for (int step = first; step < last; ++step) {
    copy_groups_wait<kStages - 2>();
    fence_async_proxy();
    __syncthreads();
    const std::uint32_t base = shared + stage * kStage;
    const std::uint64_t a = wgmma_descriptor(base + warp / 4 * kConvPiece, kConvPiece);
    const std::uint64_t b = wgmma_descriptor(base + kM / 64 * kConvPiece, kConvPiece);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPlaces / 16; ++k) {  // 16 places are 2048 bytes
      conv_wgmma_transposed<T>(acc, a + 128 * k, b + 128 * k, k > 0 || step > first);
    }
    wgmma_commit();
    if (step + kStages - 1 < last) load(ahead, step + kStages - 1);
    copy_group_end();
    wgmma_wait<0>();
    stage = stage + 1 == kStages ? 0 : stage + 1;
    ahead = ahead + 1 == kStages ? 0 : ahead + 1;
  }
  copy_groups_wait<0>();
  float* to = p.parts + (static_cast<std::int64_t>(split) * p.groups + g) * p.out * columns;
  const int m = m0 + warp * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const int n = n0 + j * 8 + lane % 4 * 2;
    if (n >= columns) continue;  // columns is a multiple of 8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (m + half * 8 >= p.out) continue;
      *reinterpret_cast<float2*>(to + static_cast<std::int64_t>(m + half * 8) * columns + n) =
          make_float2(acc[j * 4 + half * 2], acc[j * 4 + half * 2 + 1]);
    }
  }
#else
  __trap();  // why_not keeps other architectures away
#endif
}

}  // namespace rm::cuda_ops
