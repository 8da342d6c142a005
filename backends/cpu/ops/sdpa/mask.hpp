// Masks of sdpa inside ISA sources: one row as f32 addends, and where the last attended key is.
#pragma once

#include "common/vec.hpp"
#include "ops/sdpa/shape.hpp"

namespace rm::cpu::RM_ISA {

constexpr float kInf = __builtin_inff();

RM_INLINE int64_t mask_bytes(DType t) {
  return t == DType::f32 ? 4 : t == DType::boolean ? 1 : t == DType::f64 ? 8 : 2;
}

RM_INLINE const char* mask_row(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t h,
                               int64_t s) {
  return static_cast<const char*>(data.mask) +
         (b * p.m[0] + h * p.m[1] + s * p.m[2]) * mask_bytes(p.mask);
}

/// True when n keys from `row` are all attended: nothing to add.
static inline bool all_true(const uint8_t* row, int64_t stride, int64_t n) {
  if (stride == 0) return row[0] != 0;
  int64_t i = 0;
  if (stride == 1) {
    // A byte of a bool is 0 or 1: eight of them are all true when their AND has every low bit.
    constexpr uint64_t kOnes = 0x0101010101010101ull;
    uint64_t all = kOnes;
    for (; i + 8 <= n; i += 8) {
      uint64_t eight;
      __builtin_memcpy(&eight, row + i, 8);
      all &= eight;
    }
    if (all != kOnes) return false;
  }
  for (; i < n; ++i) {
    if (!row[i * stride]) return false;
  }
  return true;
}

/// addend[0..n) = what the mask adds to the scores; false when it adds nothing.
static inline bool mask_addend(DType type, const char* row, int64_t stride, int64_t n,
                               float* addend) {
  if (type == DType::boolean) {
    const auto* m = reinterpret_cast<const uint8_t*>(row);
    if (all_true(m, stride, n)) return false;
    if (stride == 1) {  // by vectors
      for (int64_t i = 0; i < n; ++i) addend[i] = m[i] ? 0.0f : -kInf;
    } else {
      for (int64_t i = 0; i < n; ++i) addend[i] = m[i * stride] ? 0.0f : -kInf;
    }
    return true;
  }
  if (type == DType::f32) widen_row(reinterpret_cast<const float*>(row), stride, addend, n);
  if (type == DType::bf16) widen_row(reinterpret_cast<const bf16*>(row), stride, addend, n);
  if (type == DType::f16) widen_row(reinterpret_cast<const f16*>(row), stride, addend, n);
  if (type == DType::f64) {
    const auto* m = reinterpret_cast<const double*>(row);
    for (int64_t i = 0; i < n; ++i) addend[i] = static_cast<float>(m[i * stride]);
  }
  return true;
}

/// One past the last key any of the rows [s0, s1) attends: padding at the end is never touched.
static inline int64_t keys_end(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t h,
                               int64_t s0, int64_t s1) {
  int64_t limit = p.causal ? imin(p.t, s1) : p.t;
  if (p.mask != DType::boolean) return limit;
  if (p.m[2] == 0) s1 = s0 + 1;
  int64_t end = 0;
  for (int64_t s = s0; s < s1 && end < limit; ++s) {
    const auto* row = reinterpret_cast<const uint8_t*>(mask_row(p, data, b, h, s));
    int64_t last = limit;
    if (p.m[3] == 1) {
      for (; last >= end + 64; last -= 64) {
        uint64_t bytes[8], any = 0;
        __builtin_memcpy(bytes, row + last - 64, 64);
        for (int i = 0; i < 8; ++i) any |= bytes[i];
        if (any != 0) break;
      }
      for (uint64_t eight; last >= end + 8; last -= 8) {
        __builtin_memcpy(&eight, row + last - 8, 8);
        if (eight != 0) break;
      }
    }
    while (last > end && !row[(last - 1) * p.m[3]]) --last;
    end = last;
  }
  return end;
}

/// keys_end of each `step` of the rows [s0, s1), to `ends`; returns the largest.
static inline int64_t find_keys_ends(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t h,
                                     int64_t s0, int64_t s1, int64_t step, int64_t* ends) {
  int64_t most = 0;
  for (int64_t s = s0; s < s1; s += step, ++ends) {
    *ends = keys_end(p, data, b, h, s, imin(s + step, s1));
    most = imax(most, *ends);
  }
  return most;
}

}  // namespace rm::cpu::RM_ISA
