// What the prefill kernels share, inside ISA sources: the softmax of a block of keys, rows as the
// result has them.
#pragma once

#include "common/vec_math.hpp"
#include "ops/sdpa/mask.hpp"

namespace rm::cpu::RM_ISA {
namespace {

/// Scores of one row to weights: returns what the row's accumulators are multiplied by.
RM_INLINE float soften(float* row, int64_t valid, int64_t width, float scale, const float* addend,
                       float* most, float* sum) {
  vi lane;
  for (int l = 0; l < kWidth; ++l) lane[l] = l;
  vf high = vset(-kInf);
  for (int64_t i = 0; i < valid; i += kWidth) {
    vf x = vload(row + i) * scale;
    if (addend) x += vload(addend + i);
    if (i + kWidth > valid) x = lane < static_cast<int32_t>(valid - i) ? x : vset(-kInf);
    vstore(row + i, x);
    high = vmax(x, high);
  }
  const float block_most = vmax_of(high);
  const float now = block_most > *most ? block_most : *most;
  vf total{};
  // A NaN score leaves `now` alone but makes its weight, and so the row, NaN.
  const float shift = now == -kInf ? 0.0f : now;
  int64_t i = 0;
  for (; i < valid; i += kWidth) {
    const vf w = vexp_nonpositive(vload(row + i) - shift);
    vstore(row + i, w);
    total += w;
  }
  for (; i < width; i += kWidth) vstore(row + i, vf{});
  const float before = *most == -kInf ? 0.0f : vexp_nonpositive(vset(*most - shift))[0];
  *sum = *sum * before + vsum(total);
  *most = now;
  return before;
}

/// Rows [s0, s1) of the result from their sums, `e` floats a row, which are scaled in place.
template <class T>
RM_INLINE void write_rows(const SdpaShape& p, const SdpaData& data, int64_t b, int64_t h, int64_t s0,
                          int64_t s1, float* acc, int64_t e, const float* most, const float* sums) {
  for (int64_t s = s0; s < s1; ++s) {
    float* row = acc + (s - s0) * e;
    // A row without any key is zeros (the sum is exactly 0 only then).
    const float sum = sums[s - s0], factor = sum == 0.0f ? 0.0f : 1.0f / sum;
    for (int64_t i = 0; i < e; i += kWidth) vstore(row + i, vload(row + i) * factor);
    T* o = static_cast<T*>(data.o) + b * p.o[0] + h * p.o[1] + s * p.o[2];
    narrow_row(row, o, p.o[3], p.e);
    if (data.lse == nullptr) continue;
    static_cast<float*>(data.lse)[(b * p.heads + h) * p.s + s] =
        sum == 0.0f ? -kInf : most[s - s0] + __builtin_logf(sum);
  }
}

}  // namespace
}  // namespace rm::cpu::RM_ISA
