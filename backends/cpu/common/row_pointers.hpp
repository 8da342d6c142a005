// Where a tile reads its rows of the left operand, in as few registers as an x86 address needs. ISA
// sources only.
//
// Two registers address four rows and the one behind: p, p + s, p + 2 s, p + 4 s, and p + 3 s with a third.
// A pointer a row does not fit into the registers: the compiler then keeps pointers in memory and makes new ones,
// and those additions take places of multiply-adds (a tenth of them, 14 rows on a Xeon with AVX-512).
#pragma once

#include "common/vec.hpp"

namespace rm::cpu::RM_ISA {
namespace {

/// kRows rows, `stride` floats apart; all of them move together along k.
template <int kRows>
class RowPointers {
 public:
  RM_MEMBER RowPointers(const float* first, int64_t stride)
      : stride_(stride * int64_t{sizeof(float)}), three_(3 * stride_) {
    hold(stride_);
    hold(three_);
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      at_[g] = reinterpret_cast<const char*>(first + g * kTogether * stride);
    }
  }

  /// Element `k` behind where the row stands.
  RM_MEMBER float get(int row, int k) const {
    const int in_group = row % kTogether;
    const int64_t offset = in_group == 3 ? three_ : in_group * stride_;
    float x;
    __builtin_memcpy(&x, at_[row / kTogether] + offset + k * int64_t{sizeof(float)}, sizeof x);
    return x;
  }

  RM_MEMBER void advance(int k) {
#pragma GCC unroll 4
    for (int g = 0; g < kGroups; ++g) {
      at_[g] += k * int64_t{sizeof(float)};
      hold(at_[g]);
    }
  }

 private:
  static constexpr int kTogether = 5, kGroups = (kRows + kTogether - 1) / kTogether;

  /// The compiler neither takes `value` apart nor derives pointers of its own from it.
  template <class V>
  static RM_MEMBER void hold(V& value) {
    asm("" : "+r"(value));
  }

  const char* at_[kGroups];
  int64_t stride_, three_;  // bytes
};

}  // namespace
}  // namespace rm::cpu::RM_ISA
