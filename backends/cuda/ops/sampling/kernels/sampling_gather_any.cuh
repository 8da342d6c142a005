// A held row's few candidates: what lies above a bound that the threads' largest logits give comes,
// in order, to the cluster's first block, if it is enough for the cut; that block goes on alone.
#pragma once

#include "sampling/kernels/sampling_row_any.cuh"

namespace rm::cuda_ops {

template <class T, SamplingOver kOver>
struct SamplingGather : SamplingRow<T, kOver> {
  using Base = SamplingRow<T, kOver>;
  using Base::Base;
  static constexpr int V = Base::V;
  using Base::below_top;
  using Base::blocks;
  using Base::count;
  using Base::first;
  using Base::mass_of;
  using Base::mine;
  using Base::p;
  using Base::pack_of;
  using Base::rank;
  using Base::s;
  using Base::scan;
  using Base::words_of;
  using typename Base::Team;

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
    this->template exchange<3>(values, [&](unsigned b, const Mass* other) {
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
};

}  // namespace rm::cuda_ops
