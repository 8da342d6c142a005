// Loops over channels, a vector at a time; the rest in scalars.
#include "ops/image/kernels.hpp"

#include "common/vec_math.hpp"

namespace rm::cpu::RM_ISA {
namespace {

// body(i, count): a whole vector when count is kWidth.
template <class Whole, class Rest>
RM_INLINE void over(int64_t n, Whole&& whole, Rest&& rest) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) whole(i);
  for (; i < n; ++i) rest(i);
}

void add(float* acc, const float* x, int64_t n) {
  over(
      n, [&](int64_t i) { vstore(acc + i, vload(acc + i) + vload(x + i)); },
      [&](int64_t i) { acc[i] += x[i]; });
}

void largest(float* acc, const float* x, int64_t n) {
  over(
      n,
      [&](int64_t i) {
        const vf a = vload(acc + i), b = vload(x + i);
        vstore(acc + i, (a >= b) ? a : ((a != a) ? a : b));
      },
      [&](int64_t i) { acc[i] = acc[i] >= x[i] || acc[i] != acc[i] ? acc[i] : x[i]; });
}

void add_product(float* acc, const float* x, float w, int64_t n) {
  over(
      n, [&](int64_t i) { vstore(acc + i, vload(acc + i) + vload(x + i) * w); },
      [&](int64_t i) { acc[i] += x[i] * w; });
}

void scale(float* acc, float factor, int64_t n) {
  over(
      n, [&](int64_t i) { vstore(acc + i, vload(acc + i) * factor); },
      [&](int64_t i) { acc[i] *= factor; });
}

void moments(float* sum, float* squares, const float* x, const float* origin, int64_t n) {
  over(
      n,
      [&](int64_t i) {
        const vf d = vload(x + i) - vload(origin + i);
        vstore(sum + i, vload(sum + i) + d);
        vstore(squares + i, vload(squares + i) + d * d);
      },
      [&](int64_t i) {
        const float d = x[i] - origin[i];
        sum[i] += d;
        squares[i] += d * d;
      });
}

void affine(float* y, const float* x, const float* factor, const float* shift, bool silu,
            int64_t n) {
  over(
      n,
      [&](int64_t i) {
        const vf v = vload(x + i) * vload(factor + i) + vload(shift + i);
        vstore(y + i, silu ? vsilu(v) : v);
      },
      [&](int64_t i) {
        const vf v = vset(x[i] * factor[i] + shift[i]);
        y[i] = silu ? vsilu(v)[0] : v[0];
      });
}

void widen_any(DType type, const void* x, int64_t stride, float* y, int64_t n) {
  if (type == DType::f32) return widen_row(static_cast<const float*>(x), stride, y, n);
  if (type == DType::bf16) return widen_row(static_cast<const bf16*>(x), stride, y, n);
  widen_row(static_cast<const f16*>(x), stride, y, n);
}

void narrow_any(DType type, const float* x, void* y, int64_t stride, int64_t n) {
  if (type == DType::f32) return narrow_row(x, static_cast<float*>(y), stride, n);
  if (type == DType::bf16) return narrow_row(x, static_cast<bf16*>(y), stride, n);
  narrow_row(x, static_cast<f16*>(y), stride, n);
}

}  // namespace

extern const ImageKernels image_kernels;
const ImageKernels image_kernels = {add,     largest, add_product, scale,
                                    moments, affine,  widen_any,   narrow_any};

}  // namespace rm::cpu::RM_ISA
