// Division of 32-bit counters by a number that is known before the launch: a multiplication.
#pragma once

#include <cstdint>

namespace rm::cuda_ops {

/// q such that n / d == q for 0 <= n < 2^31, without a division (Granlund and Montgomery 1994).
struct FastDivisor {
  std::uint32_t d = 1, multiplier = 0, shift = 0;
  FastDivisor() = default;
  explicit FastDivisor(std::uint32_t divisor) : d(divisor) {
    while ((1ull << shift) < d) ++shift;
    multiplier = static_cast<std::uint32_t>(((1ull << 32) * ((1ull << shift) - d)) / d + 1);
  }
#ifdef __CUDACC__
  __device__ __forceinline__ std::uint32_t quotient(std::uint32_t n) const {
    return (__umulhi(n, multiplier) + n) >> shift;
  }
#endif
};

}  // namespace rm::cuda_ops
