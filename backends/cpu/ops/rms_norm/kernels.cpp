// rms_norm of one row: sum of squares, then the store (f32).
#include "common/norm_vec.hpp"

namespace rm::cpu::RM_ISA {
namespace {

template <class T>
void row(const NormRow& r) {
  const float* h = stage<T>(r);
  const float squares = sum_row(h, r.n, [](vf v) { return v * v; });
  const float inverse =
      1.0f / __builtin_sqrtf(squares / static_cast<float>(r.n) + static_cast<float>(r.eps));
  const auto* weight = static_cast<const float*>(r.weight);
  const auto offset = static_cast<float>(r.weight_offset);
  emit<T>(r, h, [&](vf v, int64_t i, int64_t c) {
    const vf y = v * inverse;
    return weight ? y * (column(weight, i, c) + offset) : y;
  });
}

void row_f64(const NormRow& r) {
  auto* h = static_cast<double*>(r.scratch);
  const auto *x = static_cast<const double*>(r.x),
             *residual = static_cast<const double*>(r.residual);
  const auto* weight = static_cast<const double*>(r.weight);
  auto *y = static_cast<double*>(r.y), *sum = static_cast<double*>(r.sum);
  double squares = 0;
  for (int64_t i = 0; i < r.n; ++i) {
    h[i] = x[i * r.x_stride] + (residual ? residual[i * r.residual_stride] : 0.0);
    if (sum) sum[i * r.sum_stride] = h[i];
    squares += h[i] * h[i];
  }
  const double inverse = 1.0 / __builtin_sqrt(squares / static_cast<double>(r.n) + r.eps);
  for (int64_t i = 0; i < r.n; ++i) {
    y[i * r.y_stride] = h[i] * inverse * (weight ? weight[i] + r.weight_offset : 1.0);
  }
}

NormFn find(DType t) {
  switch (t) {
    case DType::f32:
      return row<float>;
    case DType::bf16:
      return row<bf16>;
    case DType::f16:
      return row<f16>;
    case DType::f64:
      return row_f64;
    default:
      return nullptr;
  }
}

}  // namespace

extern const NormTable rms_norm_table;
const NormTable rms_norm_table = {find, widen_any};

}  // namespace rm::cpu::RM_ISA
