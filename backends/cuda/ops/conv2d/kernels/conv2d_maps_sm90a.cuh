// Convolution as a product by warpgroup products whose operands the copy engine brings: it walks
// the image's places by a map in im2col form (any stride and dilation, zeros outside), the weights
// by one of boxes. A producer warp runs ahead of 64 rows a warpgroup. For 16-bit channels in whole
// 128 bytes. Bound: tensor cores.
#pragma once

#include "_shim/async_shim.cuh"
#include "conv2d/kernels/conv2d_gemm_sm80.cuh"
#include "conv2d/kernels/conv2d_maps_args.hpp"
#include "conv2d/kernels/conv2d_wgmma_sm90a.cuh"

namespace rm::cuda_ops {

__device__ __forceinline__ void conv_load_places(std::uint32_t dst, const CUtensorMap* map,
                                                 std::uint32_t bar, int c, int w, int h, int n,
                                                 int offset_w, int offset_h) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2], {%7, %8};" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c), "r"(w), "r"(h), "r"(n), "h"(static_cast<std::uint16_t>(offset_w)),
      "h"(static_cast<std::uint16_t>(offset_h))
      : "memory");
}
__device__ __forceinline__ void conv_load_weights(std::uint32_t dst, const CUtensorMap* map,
                                                  std::uint32_t bar, int c, int kw, int kh, int o) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c), "r"(kw), "r"(kh), "r"(o)
      : "memory");
}

template <class T, int kM, int kN, int kStages>
__global__ void __launch_bounds__(2 * kM + 32, 2)
    conv2d_maps(const __grid_constant__ ConvMapsArgs q) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int kDepth = 64, kStage = (kM + kN) * 128, kThreads = 2 * kM;
  extern __shared__ __align__(128) unsigned char conv_shared[];
  __shared__ __align__(8) std::uint64_t barriers[2 * kStages];
  const ConvGemmArgs& p = q.g;
  const ConvArgs& c = p.conv;
  const int lane = threadIdx.x % 32, warp = uniform_warp();
  const int g = blockIdx.z / p.splits, split = blockIdx.z % p.splits;
  const int m0 = static_cast<int>(blockIdx.x) / p.tiles_n * kM;
  const int n0 = static_cast<int>(blockIdx.x) % p.tiles_n * kN;
  const int first = split * p.steps_per_split, last = min(p.steps, first + p.steps_per_split);
  const std::uint32_t shared = (shared_address(conv_shared) + 1023) & ~1023u;
  const std::uint32_t full = shared_address(barriers), empty = full + kStages * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(full + s * 8, 1), barrier_init(empty + s * 8, kM / 16);
    }
    barrier_init_done();
  }
  __syncthreads();
  overlap_begin();

  if (warp == kM / 16) {
    if (!elect_lane()) return;
    const ConvRow r = conv_row(m0, p.by_ow, p.by_oh);
    const int h = r.h * c.map.mul[0] + q.lower[0], w = r.w * c.map.mul[1] + q.lower[1];
    const int chunks = p.padded / kDepth;
    int tap = first / chunks, chunk = first - tap * chunks, kh = tap / c.kw, kw = tap - kh * c.kw;
    for (int step = first, stage = 0, round = 0; step < last; ++step) {
      if (round > 0) barrier_wait_or_trap(empty + stage * 8, (round - 1) & 1);
      const std::uint32_t bar = full + stage * 8, to = shared + stage * kStage;
      barrier_expect(bar, kStage);
      const int at_h = q.step[0] < 0 ? (kh + 1 - c.kh) * q.step[0] : kh * q.step[0];
      const int at_w = q.step[1] < 0 ? (kw + 1 - c.kw) * q.step[1] : kw * q.step[1];
      conv_load_places(to, &q.x, bar, g * p.padded + chunk * kDepth, w, h, r.n, at_w, at_h);
      conv_load_weights(to + kM * 128, &q.w, bar, chunk * kDepth, kw, kh, g * c.out + n0);
      if (++chunk == chunks) {
        chunk = 0;
        if (++kw == c.kw) kw = 0, ++kh;
      }
      if (++stage == kStages) stage = 0, ++round;
    }
    return;
  }

  float acc[kN / 2];
  const std::uint32_t group_rows = warp / 4 * 64 * 128;
  int stage = 0, parity = 0, before = 0;
  for (int step = first; step < last; ++step) {
    barrier_wait_or_trap(full + stage * 8, parity);
    const std::uint64_t a = wgmma_descriptor(shared + stage * kStage + group_rows);
    const std::uint64_t b = wgmma_descriptor(shared + stage * kStage + kM * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      conv_wgmma<T, kN>(acc, a + 2 * k, b + 2 * k, k > 0 || step > first);
    }
    wgmma_commit();
    if (step > first) {  // the products of the step before are done: its stage is free
      wgmma_wait<1>();
      if (lane == 0) barrier_arrive(empty + before * 8);
    }
    before = stage;
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>();
  named_barrier(1, kThreads);  // all stages are read: results go there

  float* result = reinterpret_cast<float*>(conv_shared + (shared - shared_address(conv_shared)));
  constexpr int kPitch = kConvPitch<kN>;
  float* to = result + (warp * 16 + lane / 4) * kPitch + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    to[j * 8] = acc[j * 4], to[j * 8 + 1] = acc[j * 4 + 1];
    to[j * 8 + 8 * kPitch] = acc[j * 4 + 2], to[j * 8 + 8 * kPitch + 1] = acc[j * 4 + 3];
  }
  named_barrier(1, kThreads);
  conv_store_tile<T, kM, kN, kThreads>(p, result, m0, n0, g, split);
#else
  __trap();  // why_not keeps other architectures away
#endif
}

}  // namespace rm::cuda_ops
