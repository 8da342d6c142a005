// Squares of 32-bit words transposed in registers; for packing weights that are dense along k.
#pragma once

#include "ops/gemm/simd.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

/// kLanes words of each of kLanes rows that lie `stride` elements apart.
template <class S>
RM_INLINE void load_square(const S* src, int64_t stride, Bits* square) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    square[i] = *reinterpret_cast<const BitsMem*>(src + i * stride);
  }
}

/// Swaps the off-diagonal blocks of side kSide.
template <int kSide>
RM_INLINE void transpose_step(Bits* r) {
  Ints low, high;
  for (int l = 0; l < kLanes; ++l) {
    low[l] = (l & kSide) == 0 ? l : kLanes + (l ^ kSide);
    high[l] = (l & kSide) == 0 ? (l ^ kSide) : kLanes + l;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i & kSide) continue;
    const Bits a = r[i], b = r[i | kSide];
    r[i] = __builtin_shuffle(a, b, low);
    r[i | kSide] = __builtin_shuffle(a, b, high);
  }
}

RM_INLINE void transpose(Bits* r) {
  transpose_step<1>(r);
  transpose_step<2>(r);
  if constexpr (kLanes >= 8) transpose_step<4>(r);
  if constexpr (kLanes >= 16) transpose_step<8>(r);
}

}  // namespace
}  // namespace rm::cpu::gemm::RM_ISA
