// A row of logits in tiles: 1024 threads of up to 8 blocks (a cluster, sm_90) take 32 or 64
// neighbouring elements each; a cluster reads its row once and holds it in shared memory.
#pragma once

#include <cooperative_groups.h>

#include "_shim/async_shim.cuh"
#include "sampling/kernels/sampling_args.hpp"
#include "sampling/kernels/sampling_keys_any.cuh"

namespace rm::cuda_ops {

/// Two native additions, the second where there is a carry, instead of a 64-bit one, which shared
/// memory lacks.
struct SamplingBin {
  unsigned low, high;
  __device__ Mass sum() const { return low + (static_cast<Mass>(high) << 32); }
};

struct SamplingCandidate {
  float value;
  int index;
};

struct alignas(16) SamplingShared {
  SamplingBin bins[kSamplingBins];
  union {
    Mass merged[kSamplingBins];
    SamplingCandidate candidate[kSamplingCandidates];  // of the first block
  };
  Mass warp_sum[kSamplingThreads / 32];
  Mass exchange[2][3];  // in turn, so that one cluster barrier an exchange is enough
  Mass above, equal, total;
  int bin, found;
};

/// Who looks at what: a block at a row in memory, a cluster at the row that it holds, or a block at
/// candidates.
enum class SamplingOver { memory, held, candidates };

/// The blocks of a row: one block, or a cluster.
template <bool kCluster>
struct SamplingTeam {
  __device__ static unsigned rank() { return 0; }
  __device__ static unsigned blocks() { return 1; }
  __device__ static void sync() { __syncthreads(); }
  template <class P>
  __device__ static P* of(P* shared, unsigned) {
    return shared;
  }
};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
template <>
struct SamplingTeam<true> {
  __device__ static unsigned rank() { return cooperative_groups::this_cluster().block_rank(); }
  __device__ static unsigned blocks() { return cooperative_groups::this_cluster().num_blocks(); }
  __device__ static void sync() { cooperative_groups::this_cluster().sync(); }
  template <class P>
  __device__ static P* of(P* shared, unsigned block) {
    return cooperative_groups::this_cluster().map_shared_rank(shared, block);
  }
};
#endif

template <class T, SamplingOver kOver>
struct SamplingRow {
  static constexpr bool kCluster = kOver == SamplingOver::held;
  static constexpr int V = kVec<T>;
  using Team = SamplingTeam<kCluster>;

  const SamplingArgs& p;
  const T* x;
  SamplingShared& s;
  const unsigned rank, blocks;
  int tiles, turn = 0, count = 0;  // count: of candidates
  float top = 0, mine = 0;         // the largest logit of the row, of this thread
  /// The keys are from `low` on, their differences to it of so many bits.
  std::uint32_t low = 0;
  int key_bits = kKeyBits<T>;
  Pack<T, V>* held;  // in shared memory: [per / V][kSamplingPitch]

  __device__ SamplingRow(const SamplingArgs& args, const T* row, SamplingShared& shared, void* room)
      : p(args),
        x(row),
        s(shared),
        rank(Team::rank()),
        blocks(Team::blocks()),
        held(static_cast<Pack<T, V>*>(room)) {
    const int tile = static_cast<int>(blocks) * kSamplingThreads * p.per;
    tiles = kOver == SamplingOver::memory ? (p.n + tile - 1) / tile : 1;
    if constexpr (kCluster) hold();
  }
  /// Neighbouring threads read neighbouring packs.
  __device__ void hold() {
    const int packs = p.per / V, begin = static_cast<int>(rank) * kSamplingThreads * p.per;
    for (int c = threadIdx.x; c < packs * kSamplingThreads; c += kSamplingThreads) {
      const int thread = c / packs, i = begin + c * V;
      Pack<T, V>* to = held + (c - thread * packs) * kSamplingPitch + thread;
      if (p.vectors && i + V <= p.n) {
        copy_16_async(shared_address(to), x + i, true);
      } else {
        *to = read(i);
      }
    }
    copy_group_end();
    copy_groups_wait<0>();
    __syncthreads();
  }
  __device__ __forceinline__ const Pack<T, V>& pack_of(int k) const {
    return held[k * kSamplingPitch + threadIdx.x];
  }
  /// This thread's k-th 16 bytes of the tile that begins at `i`.
  __device__ __forceinline__ uint4 words_of(int i, int k) const {
    if constexpr (kCluster) return reinterpret_cast<const uint4&>(pack_of(k));
    const Pack<T, V> pack = read(i + k * V);
    return reinterpret_cast<const uint4&>(pack);
  }
  __device__ int first(int tile) const {
    return ((tile * static_cast<int>(blocks) + static_cast<int>(rank)) * kSamplingThreads +
            static_cast<int>(threadIdx.x)) *
           p.per;
  }
  __device__ Pack<T, V> read(int i) const {
    if (p.vectors && i + V <= p.n) return *reinterpret_cast<const Pack<T, V>*>(x + i);
    Pack<T, V> out;
#pragma unroll
    for (int j = 0; j < V; ++j)
      out.v[j] = i + j < p.n ? x[i + j] : from_float<T>(-__builtin_huge_valf());
    return out;
  }
  /// fn(index, value) of this thread's elements in order; all threads make the same number of
  /// calls. Indices past the row have the value -inf.
  template <class Fn>
  __device__ __forceinline__ void each(int tile, Fn&& fn) {
    if constexpr (kOver == SamplingOver::candidates) {
      const int share = (count + kSamplingThreads - 1) / kSamplingThreads;
#pragma unroll 1
      for (int k = 0; k < share; ++k) {
        const int at = static_cast<int>(threadIdx.x) * share + k;
        const SamplingCandidate c =
            at < count ? s.candidate[at] : SamplingCandidate{-__builtin_huge_valf(), p.n};
        fn(c.index, c.value);
      }
      return;
    }
    const int i = first(tile), packs = p.per / V;
#pragma unroll 1
    for (int k = 0; k < packs; ++k) {
      float v[V];
      unpack<T>(words_of(i, k), v);
#pragma unroll
      for (int j = 0; j < V; ++j) fn(i + k * V + j, v[j]);
    }
  }
  __device__ Mass mass_of(float v) const {
    return static_cast<Mass>(exp2f((v - top) * p.scale) * 17179868160.0f);  // 2^34 - 2^10
  }

  /// Every block's values joined in the order of the blocks.
  template <int kValues, class Fn>
  __device__ __forceinline__ void exchange(const Mass (&values)[kValues], Fn&& fn) {
    turn ^= 1;
    if (threadIdx.x == 0) {
#pragma unroll
      for (int k = 0; k < kValues; ++k) s.exchange[turn][k] = values[k];
    }
    Team::sync();
    if constexpr (kCluster) {
      const unsigned lane = threadIdx.x % 32;
      Mass own[kValues] = {};
      if (lane < blocks) {
        const Mass* from = Team::of(&s.exchange[turn][0], lane);
#pragma unroll
        for (int k = 0; k < kValues; ++k) own[k] = from[k];
      }
      for (unsigned b = 0; b < blocks; ++b) {
        Mass other[kValues];
#pragma unroll
        for (int k = 0; k < kValues; ++k) other[k] = __shfl_sync(0xffffffffu, own[k], b);
        fn(b, other);
      }
    } else {
      fn(0u, s.exchange[turn]);
    }
  }
  /// The sum over the threads before this one, and over the block.
  __device__ Mass scan(Mass mine, Mass& total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    Mass upto = mine;
#pragma unroll
    for (int k = 1; k < 32; k <<= 1) {
      const Mass left = __shfl_up_sync(0xffffffffu, upto, k);
      if (lane >= k) upto += left;
    }
    __syncthreads();  // the previous scan's readers are done
    if (lane == 31) s.warp_sum[warp] = upto;
    __syncthreads();
    Mass warps = s.warp_sum[lane];  // every warp adds the warps' sums
#pragma unroll
    for (int k = 1; k < 32; k <<= 1) {
      const Mass left = __shfl_up_sync(0xffffffffu, warps, k);
      if (lane >= k) warps += left;
    }
    total = __shfl_sync(0xffffffffu, warps, 31);
    const Mass before = __shfl_sync(0xffffffffu, warps, (warp + 31) % 32);
    return (warp > 0 ? before : 0) + upto - mine;
  }
  /// Over the block.
  __device__ Mass block_max(Mass best) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 16; k > 0; k >>= 1) best = max(best, __shfl_xor_sync(0xffffffffu, best, k));
    __syncthreads();
    if (lane == 0) s.warp_sum[warp] = best;
    __syncthreads();
    best = s.warp_sum[lane];
#pragma unroll
    for (int k = 16; k > 0; k >>= 1) best = max(best, __shfl_xor_sync(0xffffffffu, best, k));
    return best;
  }

  /// The first largest logit's index; sets `top` and `mine`.
  __device__ int find_top() {
    const int packs = p.per / V;
    SamplingLargest<T> largest(first(0));
    for (int t = 0; t < tiles; ++t) {
      const int i = first(t);
#pragma unroll 1
      for (int k = 0; k < packs; ++k) largest.take(words_of(i, k), i + k * V);
    }
    mine = largest.value;
    Mass best = block_max(largest.key());
    exchange<1>({best}, [&](unsigned, const Mass* other) { best = max(best, other[0]); });
    top = sampling_value(best);
    return sampling_index(best);
  }
  /// Powers of two below the largest logit.
  __device__ __forceinline__ float below_top(float v) const { return (top - v) * p.scale; }
};

}  // namespace rm::cuda_ops
