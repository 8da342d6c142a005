// Row pieces shared by the ISA sources of the norms and softmax: f32 staging, sums, the final
// store.
#pragma once

#include "common/norm_row.hpp"
#include "common/vec.hpp"

namespace rm::cpu::RM_ISA {

/// body(offset, count) over [0, n): whole vectors first, then one part of fewer than kWidth.
template <class Whole, class Part>
RM_INLINE void over_row(int64_t n, Whole whole, Part part) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) whole(i);
  if (i < n) part(i, n - i);
}

template <class F>
RM_INLINE float sum_row(const float* h, int64_t n, F f) {
  vf s0{}, s1{}, s2{}, s3{};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) {
    s0 += f(vload(h + i));
    s1 += f(vload(h + i + kWidth));
    s2 += f(vload(h + i + 2 * kWidth));
    s3 += f(vload(h + i + 3 * kWidth));
  }
  for (; i + kWidth <= n; i += kWidth) s0 += f(vload(h + i));
  float tail = 0;
  for (; i < n; ++i) {
    vf one{};
    one[0] = h[i];
    tail += f(one)[0];
  }
  return vsum((s0 + s1) + (s2 + s3)) + tail;
}

/// x + residual as f32: in place when x is dense f32 and there is no residual, else in scratch.
/// Also writes `sum`.
template <class T>
RM_INLINE const float* stage(const NormRow& r) {
  auto* scratch = static_cast<float*>(r.scratch);
  const auto* x = static_cast<const T*>(r.x);
  const auto* residual = static_cast<const T*>(r.residual);
  const float* h = scratch;
  if (__is_same(T, float) && r.x_stride == 1 && !residual) {
    h = static_cast<const float*>(r.x);
  } else if (residual && r.x_stride == 1 && r.residual_stride == 1) {
    over_row(
        r.n, [&](int64_t i) { vstore(scratch + i, vload(x + i) + vload(residual + i)); },
        [&](int64_t i, int64_t c) {
          vstore_part(scratch + i, vload_part(x + i, c) + vload_part(residual + i, c), c);
        });
  } else {
    widen_row(x, r.x_stride, scratch, r.n);
    if (residual) {
      for (int64_t i = 0; i < r.n; ++i) scratch[i] += widen(residual[i * r.residual_stride]);
    }
  }
  if (r.sum) narrow_row(h, static_cast<T*>(r.sum), r.sum_stride, r.n);
  return h;
}

/// y = f(h, i) where f maps a vector at column i; `scratch` may hold h.
template <class T, class F>
RM_INLINE void emit(const NormRow& r, const float* h, F f) {
  auto* y = static_cast<T*>(r.y);
  auto* scratch = static_cast<float*>(r.scratch);
  if (r.y_stride == 1) {
    over_row(
        r.n, [&](int64_t i) { vstore(y + i, f(vload(h + i), i, int64_t{kWidth})); },
        [&](int64_t i, int64_t c) { vstore_part(y + i, f(vload_part(h + i, c), i, c), c); });
    return;
  }
  over_row(
      r.n, [&](int64_t i) { vstore(scratch + i, f(vload(h + i), i, int64_t{kWidth})); },
      [&](int64_t i, int64_t c) { vstore_part(scratch + i, f(vload_part(h + i, c), i, c), c); });
  narrow_row(scratch, y, r.y_stride, r.n);
}

RM_INLINE vf column(const float* v, int64_t i, int64_t count) {
  return count == kWidth ? vload(v + i) : vload_part(v + i, count);
}

static inline void widen_any(DType from, const void* src, int64_t stride, float* dst, int64_t n) {
  if (from == DType::f32) widen_row(static_cast<const float*>(src), stride, dst, n);
  if (from == DType::bf16) widen_row(static_cast<const bf16*>(src), stride, dst, n);
  if (from == DType::f16) widen_row(static_cast<const f16*>(src), stride, dst, n);
}

}  // namespace rm::cpu::RM_ISA
