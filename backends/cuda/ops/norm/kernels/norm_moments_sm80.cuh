// Sums over rows of 16-bit values with few instructions: tensor cores add up values and squares of
// four words at once (exact products, fp32 sums), and a warp's sums scatter over its lanes before
// they meet other warps'. Norms of 16-bit rows are bound by instructions, not by memory.
#pragma once

#include "_shim/launch_shim.hpp"
#include "_shim/row_shim.cuh"
#include "norm/kernels/norm_args.hpp"

namespace rm::cuda_ops {

/// Sums of values and of squares. A warp's words are a matrix of 8 rows, four lanes each: times its
/// own transpose it has the rows' squares on its diagonal, times ones the rows' sums.
template <class T>
struct RowMoments {
  float c[2][4] = {};
  __device__ __forceinline__ void add(const uint4& v) {
    constexpr std::uint32_t kOnes = std::is_same_v<T, __half> ? 0x3c003c00u : 0x3f803f80u;
    mma_16816<T>(c[0], v.x, kOnes, v.y, kOnes, v.x, v.y);
    mma_16816<T>(c[1], v.z, kOnes, v.w, kOnes, v.z, v.w);
  }
  /// This lane's shares of the warp's sums.
  __device__ __forceinline__ float sum() const {
    return (c[0][2] + c[0][3] + (c[1][2] + c[1][3])) * 0.125f;  // all eight rows hold them
  }
  __device__ __forceinline__ float squares() const {
    const int row = threadIdx.x % 32 / 4;
    const float odd = c[0][1] + c[1][1], even = c[0][0] + c[1][0];
    return static_cast<int>(threadIdx.x % 4) == row / 2 ? (row % 2 ? odd : even) : 0.0f;
  }
};

/// Sums of 1, 2 or 4 values over a warp: lanes 32 / kValues * i and the next hold value i.
template <int kValues>
__device__ __forceinline__ float scatter_sum(const float (&v)[kValues]) {
  const int lane = threadIdx.x % 32;
  float mine;
  if constexpr (kValues == 4) {
    const bool high = lane & 16, odd = lane & 8;
    float a = high ? v[2] : v[0], b = high ? v[3] : v[1];
    a += __shfl_xor_sync(0xffffffffu, high ? v[0] : v[2], 16);
    b += __shfl_xor_sync(0xffffffffu, high ? v[1] : v[3], 16);
    mine = odd ? b : a;
    mine += __shfl_xor_sync(0xffffffffu, odd ? a : b, 8);
  } else if constexpr (kValues == 2) {
    const bool high = lane & 16;
    mine = high ? v[1] : v[0];
    mine += __shfl_xor_sync(0xffffffffu, high ? v[0] : v[1], 16);
    mine += __shfl_xor_sync(0xffffffffu, mine, 8);
  } else {
    static_assert(kValues == 1);
    mine = v[0] + __shfl_xor_sync(0xffffffffu, v[0], 16);
    mine += __shfl_xor_sync(0xffffffffu, mine, 8);
  }
#pragma unroll
  for (int k = 4; k > 0; k >>= 1) mine += __shfl_xor_sync(0xffffffffu, mine, k);
  return mine;
}

/// Sums over a team of at most 16 warps, the same in all its threads; kWarps 1: a warp alone.
/// `space`: kValues floats a warp, not read any more by an earlier sum; meet(): the team's barrier.
template <bool kAlone, int kValues, class Meet>
__device__ __forceinline__ void team_sums(float (&v)[kValues], float* space, int warp, int warps,
                                          Meet&& meet) {
  constexpr int kLanes = 32 / kValues;
  const int lane = threadIdx.x % 32, at = lane % kLanes;
  float mine = scatter_sum<kValues>(v);
  if constexpr (!kAlone) {
    if (at == 0) space[warp * kValues + lane / kLanes] = mine;
    meet();
    mine = at < warps ? space[at * kValues + lane / kLanes] : 0.0f;
    if (kLanes < 16 && at + kLanes < warps) mine += space[(at + kLanes) * kValues + lane / kLanes];
#pragma unroll
    for (int k = kLanes < 16 ? kLanes / 2 : 8; k > 0; k >>= 1) {
      mine += __shfl_xor_sync(0xffffffffu, mine, k);
    }
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) v[i] = __shfl_sync(0xffffffffu, mine, i * kLanes);
}

/// Above this share of the variance a squared mean cancels too much: the row is summed again.
inline constexpr float kNormFar = 64.0f;

template <class T, bool kRms, bool kWarp, int kPer>
__global__ void __launch_bounds__(kWarp ? 128 : 512) norm_forward_moments(const NormForwardArgs p) {
  constexpr int V = kVec<T>;
  __shared__ float space[2][2 * 16];
  const int threads = kWarp ? 32 : blockDim.x, thread = threadIdx.x % threads;
  const int warp = kWarp ? 0 : threadIdx.x / 32;
  const std::int64_t row =
      kWarp ? static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32
            : static_cast<std::int64_t>(blockIdx.x);
  if (thread == 0 && row < p.rows) {
    overlap_ask(static_cast<const T*>(p.x) + row * p.x_pitch, p.n * std::int64_t{sizeof(T)});
  }
  overlap_begin(p.x, p.y, p.weight);
  if (row >= p.rows) return;
  const auto meet = [] {
    if constexpr (!kWarp) __syncthreads();
  };
  RowWords<T, kPer> x;
  x.load(p.x, row * p.x_pitch, thread, threads, p.n);
  RowMoments<T> moments;
#pragma unroll
  for (int k = 0; k < kPer; ++k) moments.add(x.v[k]);
  float sums[2] = {moments.sum(), moments.squares()};
  team_sums<kWarp>(sums, space[0], warp, threads / 32, meet);
  const float inv_n = 1.0f / static_cast<float>(p.n), mean = kRms ? 0.0f : sums[0] * inv_n;
  float variance = sums[1] * inv_n - mean * mean;
  if (!kRms && !(mean * mean <= kNormFar * variance)) {  // the same in all threads of the team
    float again[1] = {};
#pragma unroll
    for (int k = 0; k < kPer; ++k) {
      if ((thread + k * threads) * V >= p.n) continue;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float d = x.value(k, j) - mean;
        again[0] += d * d;
      }
      x.forget(k);
    }
    team_sums<kWarp>(again, space[1], warp, threads / 32, meet);
    variance = again[0] * inv_n;
  }
  const float rstd = rsqrtf(variance + p.eps), centre = -mean * rstd;
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const int i = (thread + k * threads) * V;
    if (i >= p.n) continue;
    RowWords<T, 1> w, b;
    if (p.weight) w.v[0] = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.weight) + i);
    if (p.bias) b.v[0] = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.bias) + i);
    float scale[V], y[V];
#pragma unroll
    for (int j = 0; j < V; ++j) scale[j] = p.weight ? w.value(0, j) : 1.0f;
    if (p.weight && p.weight_offset != 0.0f) {
#pragma unroll
      for (int j = 0; j < V; ++j) scale[j] += p.weight_offset;
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
      y[j] = (x.value(k, j) * rstd + centre) * scale[j] + (p.bias ? b.value(0, j) : 0.0f);
    }
    store_words(static_cast<T*>(p.y) + row * p.y_pitch + i, y);
  }
}

}  // namespace rm::cuda_ops
