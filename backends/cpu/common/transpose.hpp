// A square of vectors transposed in registers, for packing what is dense along the other axis.
//
// Include only from ISA sources.
#pragma once

namespace rm::cpu::RM_ISA {
namespace {

/// Swaps the off-diagonal blocks of side kSide; Mask: the integer vector that shuffles take.
template <class Mask, int kSide, class V>
inline __attribute__((always_inline)) void swap_blocks(V* r) {
  constexpr int kLanes = sizeof(Mask) / sizeof(Mask{}[0]);
  if constexpr (kSide < kLanes) {
    Mask low, high;
    for (int l = 0; l < kLanes; ++l) {
      low[l] = (l & kSide) == 0 ? l : kLanes + (l ^ kSide);
      high[l] = (l & kSide) == 0 ? (l ^ kSide) : kLanes + l;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if (i & kSide) continue;
      const V a = r[i], b = r[i | kSide];
      r[i] = __builtin_shuffle(a, b, low);
      r[i | kSide] = __builtin_shuffle(a, b, high);
    }
    swap_blocks<Mask, 2 * kSide>(r);
  }
}

/// r[i][j] becomes r[j][i]; as many vectors as one has lanes of Mask.
template <class Mask, class V>
inline __attribute__((always_inline)) void transpose_square(V* r) {
  swap_blocks<Mask, 1>(r);
}

}  // namespace
}  // namespace rm::cpu::RM_ISA
