// Convolution as a product by warpgroup products straight from shared memory: tiles gathered as by
// conv2d_gemm_sm80, in the 128-byte swizzle that wgmma reads. Tiles of kM places by kN channels, 64
// rows a warpgroup, kStages of 128 bytes of depth. Bound: tensor cores, for few channels memory.
#pragma once

#include "conv2d/kernels/conv2d_gemm_sm80.cuh"
#include "conv2d/kernels/conv2d_wgmma_sm90a.cuh"

namespace rm::cuda_ops {

/// `steps`: of a block; short sums leave room for more blocks.
template <int kM, int kN, int kStages>
constexpr int conv_warpgroup_shared(int steps) {
  const int stages = (steps < kStages ? steps : kStages) * (kM + kN) * 128;
  const int result = kM * kConvPitch<kN> * 4;
  return (stages > result ? stages : result) + 1024;  // the swizzle repeats each 1024 bytes
}

/// 16 bytes of shared memory, fp32 rounded to tf32. wgmma drops the bits that tf32 lacks: always
/// towards zero, which a deep network adds up to percents.
__device__ __forceinline__ void conv_round_shared(std::uint32_t at) {
  std::uint32_t r[4];
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
  conv_round<float>(r);
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

template <class T, int kM, int kN, int kStages>
__global__ void __launch_bounds__(2 * kM) conv2d_warpgroup(const __grid_constant__ ConvGemmArgs p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr int V = kVec<T>, kDepth = 8 * V, kStage = (kM + kN) * 128;
  constexpr int kThreads = 2 * kM, kRowsAtOnce = kThreads / 8;
  constexpr int kRowsA = kM / kRowsAtOnce, kRowsB = kN / kRowsAtOnce;
  extern __shared__ __align__(128) unsigned char conv_shared[];
  overlap_begin();
  const ConvArgs& c = p.conv;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int g = blockIdx.z / p.splits, split = blockIdx.z % p.splits;
  const int m0 = static_cast<int>(blockIdx.x) / p.tiles_n * kM;
  const int n0 = static_cast<int>(blockIdx.x) % p.tiles_n * kN;
  const int chunk = threadIdx.x % 8, row0 = threadIdx.x / 8;

  // this thread's rows of both operands, and its place along the depth
  const T* from[kRowsA];
  int row_h[kRowsA], row_w[kRowsA];
  const bool divided = c.map.div[0] != 1 || c.map.div[1] != 1;
#pragma unroll
  for (int i = 0; i < kRowsA; ++i) {
    const int m = m0 + row0 + i * kRowsAtOnce;
    const ConvRow r = conv_row(m < p.rows ? m : 0, p.by_ow, p.by_oh);
    row_h[i] = r.h * c.map.mul[0] + c.map.off[0], row_w[i] = r.w * c.map.mul[1] + c.map.off[1];
    from[i] = static_cast<const T*>(p.x) + r.n * p.x_stride[0] + g * p.padded;
    if (!divided) from[i] += row_h[i] * p.x_stride[1] + row_w[i] * p.x_stride[2];
    if (m >= p.rows) row_h[i] = -(1 << 30);
  }
  const int first = split * p.steps_per_split, last = min(p.steps, first + p.steps_per_split);
  const int depth0 = first * kDepth + chunk * V;
  int tap = depth0 / p.padded, channel = depth0 - tap * p.padded;
  int kh = tap / c.kw, kw = tap - kh * c.kw;
  const T* weights = static_cast<const T*>(p.w) +
                     (static_cast<std::int64_t>(g) * c.out + n0 + row0) * p.w_stride[0];
  const std::int64_t weights_step = kRowsAtOnce * p.w_stride[0];
  const int columns = min(kN, c.out - n0) - row0;  // rows of the weights from this thread's first
  const std::uint32_t shared = (shared_address(conv_shared) + 1023) & ~1023u;
  const std::uint32_t swizzled = row0 * 128 + ((chunk ^ (row0 & 7)) * 16);  // kRowsAtOnce % 8 == 0

  const auto load = [&](int stage) {
    const std::uint32_t to = shared + stage * kStage + swizzled;
    const bool inside = kh < c.kh;
    const int dh = kh * c.map.step[0], dw = kw * c.map.step[1];
    const std::int64_t offset = dh * p.x_stride[1] + dw * p.x_stride[2] + channel;
#pragma unroll
    for (int i = 0; i < kRowsA; ++i) {
      int h = row_h[i] + dh, w = row_w[i] + dw;
      bool valid = inside;
      const T* src = from[i] + offset;
      if (divided) {
        const int qh = h / c.map.div[0], qw = w / c.map.div[1];
        valid = valid && h >= 0 && w >= 0 && qh * c.map.div[0] == h && qw * c.map.div[1] == w;
        h = qh, w = qw;
        src = from[i] + h * p.x_stride[1] + w * p.x_stride[2] + channel;
      }
      valid = valid && static_cast<unsigned>(h) < static_cast<unsigned>(c.h) &&
              static_cast<unsigned>(w) < static_cast<unsigned>(c.wd);
      copy_16_async(to + i * kRowsAtOnce * 128, valid ? src : static_cast<const T*>(p.x), valid);
    }
    const T* tap_weights = weights + kh * p.w_stride[1] + kw * p.w_stride[2] + channel;
#pragma unroll
    for (int i = 0; i < kRowsB; ++i) {
      const bool valid = inside && i * kRowsAtOnce < columns;
      copy_16_async(to + (kM + i * kRowsAtOnce) * 128,
                    valid ? tap_weights + i * weights_step : static_cast<const T*>(p.w), valid);
    }
    channel += kDepth;
    while (channel >= p.padded) {
      channel -= p.padded;
      if (++kw == c.kw) kw = 0, ++kh;
    }
  };

  float acc[kN / 2];
  const std::uint32_t group_rows = warp / 4 * 64 * 128;
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) {
    if (first + s < last) load(s);
    copy_group_end();
  }
  int stage = 0, ahead = kStages - 1;
  for (int step = first; step < last; ++step) {
    copy_groups_wait<kStages - 2>();
    if constexpr (sizeof(T) == 4) {  // what this thread has copied
      const std::uint32_t mine = shared + stage * kStage + swizzled;
#pragma unroll
      for (int i = 0; i < kRowsA; ++i) conv_round_shared(mine + i * kRowsAtOnce * 128);
#pragma unroll
      for (int i = 0; i < kRowsB; ++i) conv_round_shared(mine + (kM + i * kRowsAtOnce) * 128);
    }
    fence_async_proxy();
    __syncthreads();
    const std::uint64_t a = wgmma_descriptor(shared + stage * kStage + group_rows);
    const std::uint64_t b = wgmma_descriptor(shared + stage * kStage + kM * 128);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      conv_wgmma<T, kN>(acc, a + 2 * k, b + 2 * k, k > 0 || step > first);
    }
    wgmma_commit();
    // the stage that the last step read, while the tensor cores work
    if (step + kStages - 1 < last) load(ahead);
    copy_group_end();
    wgmma_wait<0>();
    stage = stage + 1 == kStages ? 0 : stage + 1;
    ahead = ahead + 1 == kStages ? 0 : ahead + 1;
  }
  copy_groups_wait<0>();
  __syncthreads();

  float* result = reinterpret_cast<float*>(conv_shared + (shared - shared_address(conv_shared)));
  constexpr int kPitch = kConvPitch<kN>;
  float* to = result + (warp * 16 + lane / 4) * kPitch + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    to[j * 8] = acc[j * 4], to[j * 8 + 1] = acc[j * 4 + 1];
    to[j * 8 + 8 * kPitch] = acc[j * 4 + 2], to[j * 8 + 8 * kPitch + 1] = acc[j * 4 + 3];
  }
  __syncthreads();
  conv_store_tile<T, kM, kN, kThreads>(p, result, m0, n0, g, split);
#else
  __trap();  // why_not keeps other architectures away
#endif
}

}  // namespace rm::cuda_ops
