// A row of logits in tiles: 1024 threads of up to 8 blocks (a cluster, sm_90) take 32 or 64
// neighbouring elements each; a cluster reads its row once and holds it in shared memory. The k-th
// logit and the end of the nucleus are found by radix selection over the bits of the logits, 11 at
// a time. A cluster first gathers, in order, what is above a bound that the threads' largest logits
// give; if those few are enough, one block goes on with them alone. Bound: latency of the passes.
#pragma once

#include <cooperative_groups.h>

#include <type_traits>

#include "_shim/async_shim.cuh"
#include "_shim/words_shim.cuh"

namespace rm::cuda_ops {

inline constexpr int kSamplingThreads = 1024, kSamplingBins = 2048;
/// Most elements of a thread in a tile: of 4 or of 2 bytes.
inline constexpr int kSamplingPer = 32, kSamplingPerHalf = 64;
inline constexpr int kSamplingBlocks = 8;  // the largest portable cluster
/// Of a held row: neighbouring threads' packs of one number lie together, the next number's packs
/// start in other banks.
inline constexpr int kSamplingPitch = kSamplingThreads + 2;
/// Steps of 1/15 of a power of two below the largest logit: beyond the last but one the mass is 0.
inline constexpr int kSamplingSteps = 512, kSamplingStepsAUnit = 15;
inline constexpr int kSamplingCandidates = 4096;

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

/// Larger logits have larger keys; -0 is 0, NaN is the largest. The bits that tell T apart.
template <class T>
inline constexpr int kKeyBits = sizeof(T) == 4              ? 32
                                : std::is_same_v<T, __half> ? 19
                                                            : 16;
template <class T>
__device__ __forceinline__ std::uint32_t sampling_key(float v) {
  const std::uint32_t b = __float_as_uint(v + 0.0f);
  const std::uint32_t key = v != v ? 0xffffffffu : b & 0x80000000u ? ~b : b | 0x80000000u;
  return key >> (32 - kKeyBits<T>);
}

/// A logit and its index: larger logits, then lower indices are larger.
__device__ __forceinline__ Mass sampling_place(float v, int index) {
  return static_cast<Mass>(sampling_key<float>(v)) << 32 |
         (0xffffffffu - static_cast<unsigned>(index));
}
__device__ __forceinline__ int sampling_index(Mass place) {
  return static_cast<int>(0xffffffffu - static_cast<unsigned>(place));
}
__device__ __forceinline__ float sampling_value(Mass place) {
  const auto key = static_cast<std::uint32_t>(place >> 32);
  if (key == 0xffffffffu) return __uint_as_float(0x7fffffffu);
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

/// The first largest of 16-byte vectors that come in order.
template <class T>
struct SamplingLargest {
  static constexpr int V = kVec<T>;
  float value = -__builtin_huge_valf();
  int start;  // of the vector where it was
  uint4 kept;

  __device__ explicit SamplingLargest(int first) : start(first) {
    Pack<T, V> none;
#pragma unroll
    for (int j = 0; j < V; ++j) none.v[j] = from_float<T>(value);
    kept = reinterpret_cast<const uint4&>(none);
  }
  /// NaN wins.
  __device__ __forceinline__ static float largest(const uint4& w) {
    if constexpr (sizeof(T) == 2) {
      using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
      Pair pair[4];
      memcpy(pair, &w, 16);
      const Pair best = __hmax2_nan(__hmax2_nan(pair[0], pair[1]), __hmax2_nan(pair[2], pair[3]));
      return Max{}(to_float(best.x), to_float(best.y));
    } else {
      float v[4];
      unpack<T>(w, v);
      return Max{}(Max{}(v[0], v[1]), Max{}(v[2], v[3]));
    }
  }
  __device__ __forceinline__ void take(const uint4& w, int first) {
    const float best = largest(w);
    if (!(best <= value) && value == value) value = best, kept = w, start = first;
  }
  __device__ __forceinline__ Mass key() const {
    float v[V];
    unpack<T>(kept, v);
    int at = V - 1;
#pragma unroll
    for (int j = V - 2; j >= 0; --j) {
      if (v[j] == value || v[j] != v[j]) at = j;
    }
    return sampling_place(value, start + at);
  }
};

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

/// Who looks at what: a block at a row in memory, a cluster at the row that it holds, or a block at
/// candidates.
enum class SamplingOver { memory, held, candidates };

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

template <class T, SamplingOver kOver>
struct Sampler {
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

  __device__ Sampler(const SamplingArgs& args, const T* row, SamplingShared& shared, void* room)
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

  /// A step such that at least `wanted` elements of the row are at it or above, or the last step
  /// that has a mass: as far down as so many of the threads' largest logits.
  __device__ int step_of(int wanted) {
    auto* steps = reinterpret_cast<unsigned*>(s.bins);
    if (threadIdx.x < kSamplingSteps) steps[threadIdx.x] = 0;
    __syncthreads();
    const float step = below_top(mine) * kSamplingStepsAUnit;
    if (step < kSamplingSteps - 1) atomicAdd(&steps[static_cast<int>(step)], 1u);
    Team::sync();
    Mass here = 0, total = 0;
    if (threadIdx.x < kSamplingSteps) {
      unsigned part[kSamplingBlocks] = {};
#pragma unroll
      for (unsigned b = 0; b < kSamplingBlocks; ++b) {
        if (b < blocks) part[b] = *Team::of(&steps[threadIdx.x], b);
      }
#pragma unroll
      for (unsigned b = 0; b < kSamplingBlocks; ++b) here += part[b];
    }
    if (threadIdx.x == 0) s.bin = kSamplingSteps - 2;
    const auto goal = static_cast<Mass>(wanted);
    const Mass before = scan(here, total);
    if (before < goal && goal <= before + here) s.bin = threadIdx.x;
    __syncthreads();
    return s.bin;
  }
  /// Brings what is above a bound to the first block, in the order of the indices, if that is few
  /// and `enough(step, their number, their mass, the row's mass)`. Masses only where kMasses.
  template <bool kMasses, class Enough>
  __device__ bool gather(int wanted, Mass& row_mass, Enough&& enough) {
    const int step = step_of(wanted), packs = p.per / V, i = first(0);
    const float edge = static_cast<float>(step + 1) / kSamplingStepsAUnit;
    Mass mask = 0, inside = 0, all = 0;
#pragma unroll 1
    for (int k = 0; k < packs; ++k) {
      float values[V];
      unpack<T>(words_of(i, k), values);
      std::uint32_t part = 0;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        const float v = values[j];
        const bool in = below_top(v) < edge;
        part |= static_cast<std::uint32_t>(in) << j;
        if constexpr (kMasses) {
          const Mass w = mass_of(v);
          all += w;
          if (in) inside += w;
        }
      }
      mask |= static_cast<Mass>(part) << (k * V);
    }
    Mass values[3] = {}, sum[3] = {};
    auto at = static_cast<std::uint32_t>(scan(__popcll(mask), values[0]));
    if constexpr (kMasses) scan(inside, values[1]), scan(all, values[2]);
    exchange<3>(values, [&](unsigned b, const Mass* other) {
      if (b < rank) at += static_cast<std::uint32_t>(other[0]);
#pragma unroll
      for (int k = 0; k < 3; ++k) sum[k] += other[k];
    });
    row_mass = sum[2];
    if (sum[0] > kSamplingCandidates || !enough(step, sum[0], sum[1], sum[2])) return false;
    count = static_cast<int>(sum[0]);
    SamplingCandidate* to = Team::of(s.candidate, 0);
    for (; mask != 0; mask &= mask - 1) {
      const int e = __ffsll(static_cast<long long>(mask)) - 1;
      const T value = reinterpret_cast<const T*>(&pack_of(e / V))[e % V];
      to[at++] = {to_float(value), i + e};
    }
    Team::sync();
    return true;
  }

  __device__ void add_to_bin(int digit, Mass w) {
    if (w == 0) return;
    const auto added = static_cast<unsigned>(w);
    const unsigned before = atomicAdd(&s.bins[digit].low, added);
    const unsigned carry = before + added < before ? 1 : 0;
    const unsigned above = static_cast<unsigned>(w >> 32) + carry;
    if (above) atomicAdd(&s.bins[digit].high, above);
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
        const std::uint32_t key = sampling_key<T>(v) - low;
        const Mass w = key >> shift >> bits == prefix ? weight(i, v, key + low) : 0;
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
      if constexpr (kOver == SamplingOver::memory) {
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
        SamplingBin part[kSamplingBlocks];
#pragma unroll
        for (unsigned r = 0; r < kSamplingBlocks; ++r) {
          part[r] = r < blocks ? *Team::of(&s.bins[b], r) : SamplingBin{0, 0};
        }
#pragma unroll
        for (unsigned r = 0; r < kSamplingBlocks; ++r) all += part[r].sum();
        for (unsigned r = 0; r < blocks; ++r) *Team::of(&s.merged[b], r) = all;
      }
      Team::sync();
    } else if constexpr (kOver == SamplingOver::memory) {
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
    for (int pass = 0; pass == 0 || 11 * pass < key_bits; ++pass) {
      const int left = key_bits - 11 * (pass + 1), bits = left < 0 ? 11 + left : 11;
      fill_bins(max(left, 0), bits, prefix, weight);
      Mass mine[kMine], sum = 0, total = 0;
#pragma unroll
      for (int k = 0; k < kMine; ++k) {  // from the largest digit down
        const int b = kSamplingBins - 1 - (static_cast<int>(threadIdx.x) * kMine + k);
        mine[k] = kOver == SamplingOver::candidates ? s.bins[b].sum() : s.merged[b];
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
    return prefix + low;
  }
  /// Of candidates: what all their keys have in common needs no pass.
  __device__ void narrow() {
    std::uint32_t most = 0;  // of the complements
    each(0, [&](int i, float v) {
      if (i < p.n) most = max(most, ~sampling_key<T>(v));
    });
    low = ~static_cast<std::uint32_t>(block_max(most));
    key_bits = 32 - __clz(static_cast<int>(sampling_key<T>(top) - low));
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
      exchange<1>({block}, [&](unsigned b, const Mass* other) {
        if (b < rank) upto += other[0];
        tile += other[0];
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
template <class T, SamplingOver kOver, class Weight, class Target>
__device__ SamplingCut cut_off(Sampler<T, kOver>& sampler, Weight&& weight, Target&& target) {
  using Team = typename Sampler<T, kOver>::Team;
  SamplingShared& s = sampler.s;
  Mass wanted = 0;
  const std::uint32_t key = sampler.select(weight, target, wanted);
  wanted -= s.above;  // of this key
  sampler.find(
      wanted - 1, [&](int i, float v, std::uint32_t k) { return k == key ? weight(i, v, k) : 0; },
      [&](int i, Mass) {
        for (unsigned b = 0; b < sampler.blocks; ++b) *Team::of(&s.found, b) = i;
      });
  Team::sync();
  return {key, s.found};
}

__device__ __forceinline__ Mass nucleus(const SamplingArgs& p, Mass total) {
  const auto share = static_cast<Mass>(ceil(p.top_p * static_cast<double>(total)));
  return max(static_cast<Mass>(1), min(total, share));
}

/// Cuts what the sampler looks at and draws. row_mass: of the row, where that is not what the
/// sampler sees; 0: it is.
template <class T, SamplingOver kOver>
__device__ void draw(Sampler<T, kOver>& sampler, const SamplingArgs& p, std::int64_t row,
                     Mass row_mass) {
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
    cut = cut_off(sampler, mass,
                  [&](Mass total) { return nucleus(p, row_mass != 0 ? row_mass : total); });
  }
  Mass sum = 0, block = 0, total = 0;
  for (int t = 0; t < sampler.tiles; ++t) {
    sampler.each(t, [&](int i, float v) { sum += mass(i, v, sampling_key<T>(v)); });
  }
  sampler.scan(sum, block);
  sampler.template exchange<1>({block}, [&](unsigned, const Mass* other) { total += other[0]; });
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

/// The threads' largest logits that must be above the bound: candidates are somewhat more, of
/// logits in no order about three quarters of what there is room for.
__device__ __forceinline__ int wanted_of(const SamplingArgs& p, unsigned blocks) {
  if (p.top_k > 0 && p.top_k < p.n) {
    return max(256, static_cast<int>(min(static_cast<long long>(p.top_k), 1ll << 20)));
  }
  const auto threads = static_cast<float>(blocks * kSamplingThreads);
  return static_cast<int>(threads * (1.0f - __expf(-0.75f * kSamplingCandidates / threads)));
}

template <class T, SamplingOver kOver>
__device__ void sample_row(Sampler<T, kOver>& sampler, const SamplingArgs& p, std::int64_t row) {
  const int best = sampler.find_top();
  const bool finite = isfinite(sampler.top);
  if (!finite || p.scale == 0.0f || p.top_k == 1) {
    if (threadIdx.x != 0 || sampler.rank != 0) return;
    p.tokens[row] = best;
    if (p.probability) p.probability[row] = finite ? 1.0f : __uint_as_float(0x7fffffffu);
    return;
  }
  if constexpr (kOver == SamplingOver::held) {
    Mass row_mass = 0;
    bool few = false;
    if (p.top_k > 0 && p.top_k < p.n) {
      few = sampler.template gather<false>(
          wanted_of(p, sampler.blocks), row_mass, [&](int step, Mass count, Mass, Mass) {
            return step == kSamplingSteps - 2 || count >= static_cast<Mass>(p.top_k);
          });
      row_mass = 0;
    } else if (p.top_p < 1.0) {
      few = sampler.template gather<true>(
          wanted_of(p, sampler.blocks), row_mass, [&](int step, Mass, Mass inside, Mass all) {
            return step == kSamplingSteps - 2 || inside >= nucleus(p, all);
          });
    }
    if (few) {
      if (sampler.rank != 0) return;
      Sampler<T, SamplingOver::candidates> rest(p, sampler.x, sampler.s, nullptr);
      rest.count = sampler.count, rest.top = sampler.top;
      rest.narrow();
      draw(rest, p, row, row_mass);
      return;
    }
  }
  draw(sampler, p, row, 0);
}

template <class T, SamplingOver kOver>
__global__ void __launch_bounds__(kSamplingThreads, 1) sample_rows(const SamplingArgs p) {
#if __CUDA_ARCH__ < 900
  if constexpr (kOver == SamplingOver::held) return;
#endif
  extern __shared__ uint4 sampling_room[];
  auto& s = *reinterpret_cast<SamplingShared*>(sampling_room);
  const std::int64_t row = blockIdx.y + static_cast<std::int64_t>(blockIdx.z) * gridDim.y;
  if (row >= p.rows) return;
  Sampler<T, kOver> sampler(p, static_cast<const T*>(p.logits) + row * p.pitch, s,
                            sampling_room + sizeof(SamplingShared) / 16);
  sample_row(sampler, p, row);
  // no block leaves while others read it
  if constexpr (kOver == SamplingOver::held) SamplingTeam<true>::sync();
}

}  // namespace rm::cuda_ops
