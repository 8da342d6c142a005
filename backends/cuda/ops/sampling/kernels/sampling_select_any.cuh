// The k-th logit and the end of the nucleus by radix selection over the bits of the logits, 11 at a
// time; the element at which a sum of weights crosses a number. Bound: latency of the passes.
#pragma once

#include "sampling/kernels/sampling_gather_any.cuh"

namespace rm::cuda_ops {

template <class T, SamplingOver kOver>
struct Sampler : SamplingGather<T, kOver> {
  using Base = SamplingGather<T, kOver>;
  using Base::Base;
  static constexpr bool kCluster = Base::kCluster;
  using Base::block_max;
  using Base::blocks;
  using Base::each;
  using Base::key_bits;
  using Base::low;
  using Base::p;
  using Base::rank;
  using Base::s;
  using Base::scan;
  using Base::tiles;
  using Base::top;
  using typename Base::Team;

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
      this->template exchange<1>({block}, [&](unsigned b, const Mass* other) {
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

}  // namespace rm::cuda_ops
