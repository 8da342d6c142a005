// The first largest logit of each row in whole vectors: up to 8 blocks (a cluster, sm_90) a row,
// each thread asks for four vectors before it looks at the first. Bound: memory, for few rows
// latency.
#pragma once

#include "_shim/launch_shim.hpp"
#include "sampling/kernels/sampling_row_any.cuh"

namespace rm::cuda_ops {

inline constexpr int kArgmaxThreads = 512;

template <class T>
__global__ void __launch_bounds__(kArgmaxThreads) sample_largest(const SamplingArgs p) {
#if __CUDA_ARCH__ >= 900
  using Team = SamplingTeam<true>;
  constexpr int V = kVec<T>, kLoads = 4;
  __shared__ Mass warp_best[kArgmaxThreads / 32], block_best;
  overlap_begin(p.logits, p.tokens);
  const std::int64_t row = blockIdx.y + static_cast<std::int64_t>(blockIdx.z) * gridDim.y;
  if (row >= p.rows) return;  // all blocks of the cluster
  const T* x = static_cast<const T*>(p.logits) + row * p.pitch;
  const int packs = p.n / V, step = static_cast<int>(gridDim.x) * kArgmaxThreads;
  const int thread = static_cast<int>(blockIdx.x) * kArgmaxThreads + threadIdx.x;
  SamplingLargest<T> best(thread * V);
#pragma unroll 1
  for (int j = thread; j < packs; j += kLoads * step) {
    uint4 w[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (j + u * step < packs) w[u] = reinterpret_cast<const uint4*>(x)[j + u * step];
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      if (j + u * step < packs) best.take(w[u], (j + u * step) * V);
    }
  }
  Mass found = thread < packs ? best.key() : 0;
  if (thread < p.n - packs * V) {  // what is no whole vector
    const int i = packs * V + thread;
    found = max(found, sampling_place(to_float(x[i]), i));
  }
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int k = 16; k > 0; k >>= 1) found = max(found, __shfl_xor_sync(0xffffffffu, found, k));
  if (lane == 0) warp_best[warp] = found;
  __syncthreads();
  if (warp == 0) {
    found = lane < kArgmaxThreads / 32 ? warp_best[lane] : 0;
#pragma unroll
    for (int k = 16; k > 0; k >>= 1) found = max(found, __shfl_xor_sync(0xffffffffu, found, k));
    if (lane == 0) block_best = found;
  }
  Team::sync();
  if (warp == 0 && Team::rank() == 0) {
    found = lane < static_cast<int>(Team::blocks()) ? *Team::of(&block_best, lane) : 0;
#pragma unroll
    for (int k = 4; k > 0; k >>= 1) found = max(found, __shfl_xor_sync(0xffffffffu, found, k));
    if (lane == 0) {
      p.tokens[row] = sampling_index(found);
      if (p.probability) {
        p.probability[row] = isfinite(sampling_value(found)) ? 1.0f : __uint_as_float(0x7fffffffu);
      }
    }
  }
  Team::sync();  // no block leaves while others read it
#else
  __trap();  // why_not keeps older architectures away
#endif
}

}  // namespace rm::cuda_ops
