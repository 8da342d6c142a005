// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): a thread makes
// the four elements of a block of the generator. Bound: the integer units; of few elements the launch.
#pragma once

#include <cstdint>

#include "_shim/launch_shim.hpp"

namespace rm::cuda_ops {

struct UniformArgs {
  const std::int64_t* state;
  std::int64_t step;  // between seed and counter
  void* y;
  std::int64_t size;
};

__device__ __forceinline__ uint4 philox_block(std::uint64_t block, std::uint64_t counter,
                                              std::uint64_t seed) {
  uint4 c = make_uint4(static_cast<std::uint32_t>(block), static_cast<std::uint32_t>(block >> 32),
                       static_cast<std::uint32_t>(counter),
                       static_cast<std::uint32_t>(counter >> 32));
  auto k0 = static_cast<std::uint32_t>(seed), k1 = static_cast<std::uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const std::uint32_t a = __umulhi(0xD2511F53u, c.x), b = __umulhi(0xCD9E8D57u, c.z);
    c = make_uint4(b ^ c.y ^ k0, 0xCD9E8D57u * c.z, a ^ c.w ^ k1, 0xD2511F53u * c.x);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c;
}

/// The upper 24 bits: every value is a float, and below 1.
template <class T>
__global__ void __launch_bounds__(256) uniform_philox(const UniformArgs a) {
  overlap_begin(a.state, a.y);
  const auto seed = static_cast<std::uint64_t>(a.state[0]);
  const auto counter = static_cast<std::uint64_t>(a.state[a.step]);
  T* y = static_cast<T*>(a.y);
  const std::int64_t blocks = (a.size + 3) / 4, stride = gridDim.x * 256ll;
  for (std::int64_t b = blockIdx.x * 256ll + threadIdx.x; b < blocks; b += stride) {
    const uint4 words = philox_block(static_cast<std::uint64_t>(b), counter, seed);
    const std::uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (b * 4 + i < a.size) y[b * 4 + i] = static_cast<T>(word[i] >> 8) * static_cast<T>(0x1p-24);
    }
  }
}

}  // namespace rm::cuda_ops
