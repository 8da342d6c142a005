// Squares of 32-bit words transposed in registers; for packing weights that are dense along k.
#pragma once

#include "common/transpose.hpp"
#include "ops/gemm/elements.hpp"

namespace rm::cpu::gemm::RM_ISA {
namespace {

/// kWidth words of each of kWidth rows that lie `stride` elements apart.
template <class S>
RM_INLINE void load_square(const S* src, int64_t stride, vu* square) {
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) {
    square[i] = load_bits(src + i * stride);
  }
}

RM_INLINE void transpose(vu* r) { cpu::RM_ISA::transpose_square<vi>(r); }

}  // namespace
}  // namespace rm::cpu::gemm::RM_ISA
