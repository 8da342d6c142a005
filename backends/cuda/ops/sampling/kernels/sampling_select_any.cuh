// A row of logits in tiles: 1024 threads of up to 8 blocks (a cluster, sm_90) take 32 neighbouring
// elements each; a cluster reads its row once and holds it in shared memory. The k-th logit and the
// end of the nucleus are found by radix selection over the bits of the logits, 11 at a time. Bound:
// latency of the passes.
#pragma once

#include <cooperative_groups.h>

#include "_shim/device_shim.cuh"

namespace rm::cuda_ops {

inline constexpr int kSamplingThreads = 1024, kSamplingPer = 32, kSamplingBins = 2048;
inline constexpr int kSamplingBlocks = 8;  // the largest portable cluster

struct SamplingArgs {
  const void* logits;
  const float* u;
  const std::int64_t* rng;
  std::int64_t* tokens;
  float* probability;
  std::int64_t rows, pitch, top_k;
  int n, per;   // per: a thread's elements in a tile, whole vectors
  float scale;  // log2(e) / temperature; 0: the argmax
  double top_p;
  bool vectors;  // rows start on 16 bytes
};

using Mass = unsigned long long;

/// The largest mass is below 2^34 and a tile of a block has 2^15 elements, so a bin's halves of 17
/// bits stay below 2^32: two native additions instead of a 64-bit one, which shared memory lacks.
struct SamplingBin {
  unsigned low, high;
  __device__ Mass sum() const { return low + (static_cast<Mass>(high) << 17); }
};

struct SamplingShared {
  SamplingBin bins[kSamplingBins];
  Mass merged[kSamplingBins];
  Mass warp_sum[kSamplingThreads / 32];
  Mass exchange[2];  // in turn, so that one cluster barrier an exchange is enough
  Mass above, equal, total;
  int bin, found;
};

/// Larger logits have larger keys; -0 is 0, NaN is the largest. 22 bits tell 16-bit types apart.
template <class T>
__device__ __forceinline__ std::uint32_t sampling_key(float v) {
  const std::uint32_t b = __float_as_uint(v + 0.0f);
  const std::uint32_t key = v != v ? 0xffffffffu : b & 0x80000000u ? ~b : b | 0x80000000u;
  return sizeof(T) == 2 ? key >> 10 : key;
}

/// The first 64 bits of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2,
/// 3", 2011) for a seed and a 128-bit counter.
__device__ inline Mass philox_bits(Mass seed, Mass counter, Mass subsequence) {
  std::uint32_t c0 = static_cast<std::uint32_t>(counter),
                c1 = static_cast<std::uint32_t>(counter >> 32);
  std::uint32_t c2 = static_cast<std::uint32_t>(subsequence);
  std::uint32_t c3 = static_cast<std::uint32_t>(subsequence >> 32);
  std::uint32_t k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint32_t h0 = __umulhi(0xD2511F53u, c0), l0 = 0xD2511F53u * c0;
    const std::uint32_t h1 = __umulhi(0xCD9E8D57u, c2), l1 = 0xCD9E8D57u * c2;
    c0 = h1 ^ c1 ^ k0, c1 = l1, c2 = h0 ^ c3 ^ k1, c3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return static_cast<Mass>(c1) << 32 | c0;
}

/// The blocks of a row: a cluster, or one block.
template <bool kCluster>
struct SamplingTeam {
  __device__ static unsigned rank() {
    if constexpr (kCluster) return cooperative_groups::this_cluster().block_rank();
    return 0;
  }
  __device__ static unsigned blocks() {
    if constexpr (kCluster) return cooperative_groups::this_cluster().num_blocks();
    return 1;
  }
  __device__ static void sync() {
    if constexpr (kCluster) {
      cooperative_groups::this_cluster().sync();
    } else {
      __syncthreads();
    }
  }
  template <class P>
  __device__ static P* of(P* shared, unsigned block) {
    if constexpr (kCluster)
      return cooperative_groups::this_cluster().map_shared_rank(shared, block);
    return shared;
  }
};

template <class T, bool kCluster>
struct Sampler {
  static constexpr int V = kVec<T>;
  static constexpr int kKeyBits = sizeof(T) == 2 ? 22 : 32, kPasses = (kKeyBits + 10) / 11;
  using Team = SamplingTeam<kCluster>;

  const SamplingArgs& p;
  const T* x;
  SamplingShared& s;
  const unsigned rank, blocks;
  int tiles, turn = 0;
  float top = 0;
  Pack<T, V>* held;  // in shared memory: [per / V][threads], each thread its own

  __device__ Sampler(const SamplingArgs& args, const T* row, SamplingShared& shared, void* room)
      : p(args),
        x(row),
        s(shared),
        rank(Team::rank()),
        blocks(Team::blocks()),
        held(static_cast<Pack<T, V>*>(room)) {
    const int tile = static_cast<int>(blocks) * kSamplingThreads * p.per;
    tiles = kCluster ? 1 : (p.n + tile - 1) / tile;
    if constexpr (kCluster) {
      const int i = first(0);
#pragma unroll 4
      for (int k = 0; k < p.per / V; ++k)
        held[k * kSamplingThreads + threadIdx.x] = read(i + k * V);
    }
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
    const int i = first(tile), packs = p.per / V;
#pragma unroll 1
    for (int k = 0; k < packs; ++k) {
      const Pack<T, V> pack = kCluster ? held[k * kSamplingThreads + threadIdx.x] : read(i + k * V);
#pragma unroll
      for (int j = 0; j < V; ++j) fn(i + k * V + j, to_float(pack.v[j]));
    }
  }
  __device__ Mass mass_of(float v) const {
    return static_cast<Mass>(exp2f((v - top) * p.scale) * 17179868160.0f);  // 2^34 - 2^10
  }

  /// Every block's value joined in the order of the blocks.
  template <class Fn>
  __device__ __forceinline__ void exchange(Mass mine, Fn&& fn) {
    turn ^= 1;
    if (threadIdx.x == 0) s.exchange[turn] = mine;
    Team::sync();
    for (unsigned b = 0; b < blocks; ++b) fn(b, *Team::of(&s.exchange[turn], b));
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
    Mass before = upto - mine;
    total = 0;
#pragma unroll
    for (int w = 0; w < kSamplingThreads / 32; ++w) {
      if (w == warp) before += total;
      total += s.warp_sum[w];
    }
    return before;
  }

  /// The first largest logit's index; sets `top`.
  __device__ int find_top() {
    Mass best = 0;
    for (int t = 0; t < tiles; ++t) {
      each(t, [&](int i, float v) {
        const std::uint32_t b = __float_as_uint(v + 0.0f);
        const std::uint32_t key = v != v ? 0xffffffffu : b & 0x80000000u ? ~b : b | 0x80000000u;
        const Mass mine = static_cast<Mass>(key) << 32 | (0xffffffffu - static_cast<unsigned>(i));
        if (i < p.n && mine > best) best = mine;
      });
    }
#pragma unroll
    for (int k = 16; k > 0; k >>= 1) best = max(best, __shfl_xor_sync(0xffffffffu, best, k));
    if (threadIdx.x % 32 == 0) s.warp_sum[threadIdx.x / 32] = best;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kSamplingThreads / 32; ++w) best = max(best, s.warp_sum[w]);
    exchange(best, [&](unsigned, Mass other) { best = max(best, other); });
    const auto key = static_cast<std::uint32_t>(best >> 32);
    top = __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
    if (key == 0xffffffffu) top = __uint_as_float(0x7fffffffu);
    return static_cast<int>(0xffffffffu - static_cast<unsigned>(best));
  }

  __device__ void add_to_bin(int digit, Mass w) {
    const unsigned low = static_cast<unsigned>(w) & 0x1ffffu, high = static_cast<unsigned>(w >> 17);
    if (low) atomicAdd(&s.bins[digit].low, low);
    if (high) atomicAdd(&s.bins[digit].high, high);
  }
  /// merged[d] = the weights, over all tiles and blocks, of the keys that begin with `prefix` and
  /// go on with the `bits` bits d.
  template <class Weight>
  __device__ void fill_bins(int shift, int bits, std::uint32_t prefix, Weight&& weight) {
    constexpr int kMine = kSamplingBins / kSamplingThreads;
    Mass sum[kMine] = {};
    for (int t = 0; t < tiles; ++t) {
      for (int b = threadIdx.x; b < kSamplingBins; b += kSamplingThreads) s.bins[b] = {0, 0};
      __syncthreads();
      int run = 0;  // neighbours of one digit are added first: masked and flat rows have one digit
      Mass run_sum = 0;
      each(t, [&](int i, float v) {
        const std::uint32_t key = sampling_key<T>(v);
        const Mass w = key >> shift >> bits == prefix ? weight(i, v, key) : 0;
        if (w == 0) return;
        const int digit = static_cast<int>(key >> shift & ((1u << bits) - 1));
        if (digit != run) {
          add_to_bin(run, run_sum);
          run = digit, run_sum = 0;
        }
        run_sum += w;
      });
      add_to_bin(run, run_sum);
      __syncthreads();
      if constexpr (!kCluster) {
#pragma unroll
        for (int k = 0; k < kMine; ++k) sum[k] += s.bins[threadIdx.x + k * kSamplingThreads].sum();
      }
    }
    if constexpr (kCluster) {  // the blocks share the bins out among them
      Team::sync();
      const int share = kSamplingBins / static_cast<int>(blocks);
      for (int k = threadIdx.x; k < share; k += kSamplingThreads) {
        const int b = static_cast<int>(rank) * share + k;
        Mass all = 0;
        for (unsigned r = 0; r < blocks; ++r) all += Team::of(&s.bins[b], r)->sum();
        for (unsigned r = 0; r < blocks; ++r) *Team::of(&s.merged[b], r) = all;
      }
      Team::sync();
    } else {
#pragma unroll
      for (int k = 0; k < kMine; ++k) s.merged[threadIdx.x + k * kSamplingThreads] = sum[k];
      __syncthreads();
    }
  }
  /// The largest key such that the weights of the keys from it up reach wanted = target(the sum of
  /// all). s.above: the weights of larger keys; s.equal: of this key.
  template <class Weight, class Target>
  __device__ std::uint32_t select(Weight&& weight, Target&& target, Mass& wanted) {
    constexpr int kMine = kSamplingBins / kSamplingThreads;
    std::uint32_t prefix = 0;
    Mass above = 0;
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const int left = kKeyBits - 11 * (pass + 1), bits = left < 0 ? 11 + left : 11;
      fill_bins(max(left, 0), bits, prefix, weight);
      Mass mine[kMine], sum = 0, total = 0;
#pragma unroll
      for (int k = 0; k < kMine; ++k) {  // from the largest digit down
        mine[k] = s.merged[kSamplingBins - 1 - (static_cast<int>(threadIdx.x) * kMine + k)];
        sum += mine[k];
      }
      Mass upto = above + scan(sum, total);
      if (pass == 0) wanted = target(total);
#pragma unroll
      for (int k = 0; k < kMine; ++k) {
        if (upto < wanted && wanted <= upto + mine[k]) {
          s.bin = kSamplingBins - 1 - (static_cast<int>(threadIdx.x) * kMine + k);
          s.above = upto, s.equal = mine[k];
        }
        upto += mine[k];
      }
      __syncthreads();
      prefix = prefix << bits | static_cast<unsigned>(s.bin);
      above = s.above;
    }
    return prefix;
  }

  /// fn(index, weight) in the one thread at whose element the weights, summed by index, exceed
  /// `target`.
  template <class Weight, class Fn>
  __device__ void find(Mass target, Weight&& weight, Fn&& fn) {
    Mass base = 0;
    for (int t = 0; t < tiles; ++t) {
      Mass sum = 0, block = 0, tile = 0;
      each(t, [&](int i, float v) { sum += weight(i, v, sampling_key<T>(v)); });
      Mass upto = base + scan(sum, block);
      exchange(block, [&](unsigned b, Mass other) {
        if (b < rank) upto += other;
        tile += other;
      });
      if (upto <= target && target < upto + sum) {
        each(t, [&](int i, float v) {
          const Mass w = weight(i, v, sampling_key<T>(v));
          if (upto <= target && target < upto + w) fn(i, w);
          upto += w;
        });
      }
      base += tile;
      if (target < base) break;
    }
  }
};

/// What a cut leaves: keys above `key`, and those equal to it up to index `last`.
struct SamplingCut {
  std::uint32_t key = 0;
  int last = 0x7fffffff;
  __device__ __forceinline__ bool keeps(int i, std::uint32_t k) const {
    return k > key || (k == key && i <= last);
  }
};

/// The shortest part of the order (larger keys, then lower indices) whose weights reach
/// target(their sum). Elements of one key that weigh anything weigh the same.
template <class T, bool kCluster, class Weight, class Target>
__device__ SamplingCut cut_off(Sampler<T, kCluster>& sampler, Weight&& weight, Target&& target) {
  SamplingShared& s = sampler.s;
  Mass wanted = 0;
  const std::uint32_t key = sampler.select(weight, target, wanted);
  wanted -= s.above;  // of this key
  sampler.find(
      wanted - 1, [&](int i, float v, std::uint32_t k) { return k == key ? weight(i, v, k) : 0; },
      [&](int i, Mass) {
        for (unsigned b = 0; b < sampler.blocks; ++b) *SamplingTeam<kCluster>::of(&s.found, b) = i;
      });
  SamplingTeam<kCluster>::sync();
  return {key, s.found};
}

template <class T, bool kCluster>
__device__ void sample_row(Sampler<T, kCluster>& sampler, const SamplingArgs& p, std::int64_t row) {
  const int best = sampler.find_top();
  const bool finite = isfinite(sampler.top);
  if (!finite || p.scale == 0.0f || p.top_k == 1) {
    if (threadIdx.x != 0 || sampler.rank != 0) return;
    p.tokens[row] = best;
    if (p.probability) p.probability[row] = finite ? 1.0f : __uint_as_float(0x7fffffffu);
    return;
  }
  SamplingCut cut;
  if (p.top_k > 0 && p.top_k < p.n) {
    cut = cut_off(
        sampler, [&](int, float v, std::uint32_t) -> Mass { return sampler.mass_of(v) > 0; },
        [&](Mass total) { return min(total, static_cast<Mass>(p.top_k)); });
  }
  const auto mass = [&](int i, float v, std::uint32_t k) -> Mass {
    return cut.keeps(i, k) ? sampler.mass_of(v) : 0;
  };
  if (p.top_p < 1.0) {
    cut = cut_off(sampler, mass, [&](Mass total) {
      const auto share = static_cast<Mass>(ceil(p.top_p * static_cast<double>(total)));
      return max(static_cast<Mass>(1), min(total, share));
    });
  }
  Mass sum = 0, block = 0, total = 0;
  for (int t = 0; t < sampler.tiles; ++t) {
    sampler.each(t, [&](int i, float v) { sum += mass(i, v, sampling_key<T>(v)); });
  }
  sampler.scan(sum, block);
  sampler.exchange(block, [&](unsigned, Mass other) { total += other; });
  Mass target;
  if (p.u) {
    target = static_cast<Mass>(static_cast<double>(p.u[row]) * static_cast<double>(total));
  } else {
    target = __umul64hi(philox_bits(static_cast<Mass>(p.rng[0]), static_cast<Mass>(p.rng[1]),
                                    static_cast<Mass>(row)),
                        total);
  }
  sampler.find(min(target, total - 1), mass, [&](int i, Mass w) {
    p.tokens[row] = i;
    if (p.probability) {
      p.probability[row] = static_cast<float>(static_cast<double>(w) / static_cast<double>(total));
    }
  });
}

template <class T, bool kCluster>
__global__ void __launch_bounds__(kSamplingThreads, 1) sample_rows(const SamplingArgs p) {
#if __CUDA_ARCH__ < 900
  if constexpr (kCluster) return;
#endif
  __shared__ SamplingShared s;
  extern __shared__ uint4 sampling_room[];
  const std::int64_t row = blockIdx.y + static_cast<std::int64_t>(blockIdx.z) * gridDim.y;
  if (row >= p.rows) return;
  Sampler<T, kCluster> sampler(p, static_cast<const T*>(p.logits) + row * p.pitch, s,
                               sampling_room);
  sample_row(sampler, p, row);
  if constexpr (kCluster) SamplingTeam<true>::sync();  // no block leaves while others read it
}

}  // namespace rm::cuda_ops
