// Squares of 32-bit words transposed in registers; for packing weights that are dense along k.
#pragma once

#include "common/transpose.hpp"
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

RM_INLINE void transpose(Bits* r) { cpu::RM_ISA::transpose_square<Ints>(r); }

}  // namespace
}  // namespace rm::cpu::gemm::RM_ISA
