// One token a row: the largest logit, what the cuts keep, the draw. The kernel over rows.
#pragma once

#include "sampling/kernels/sampling_select_any.cuh"

namespace rm::cuda_ops {

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
__device__ __forceinline__ void sample_row_of_block(const SamplingArgs& p) {
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

template <class T, SamplingOver kOver>
__global__ void __launch_bounds__(kSamplingThreads, 1) sample_rows(const SamplingArgs p) {
#if __CUDA_ARCH__ >= 900
  sample_row_of_block<T, kOver>(p);
#else
  if constexpr (kOver == SamplingOver::held) {
    __trap();  // why_not keeps older architectures away: they have no clusters
  } else {
    sample_row_of_block<T, kOver>(p);
  }
#endif
}

}  // namespace rm::cuda_ops
