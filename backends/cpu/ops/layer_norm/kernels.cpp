// layer_norm of one row: mean, then the variance around it, then the store (two-pass, f32).
#include "common/norm_vec.hpp"

namespace rm::cpu::RM_ISA {
namespace {

template <class T>
void row(const NormRow& r) {
  const float* h = stage<T>(r);
  const auto n = static_cast<float>(r.n);
  const float mean = sum_row(h, r.n, [](vf v) { return v; }) / n;
  // Tail elements pass through the same lambda one by one, so every lane it sees is real or unused.
  const float variance = sum_row(h, r.n, [mean](vf v) { return (v - mean) * (v - mean); }) / n;
  const float inverse = 1.0f / __builtin_sqrtf(variance + static_cast<float>(r.eps));
  const auto* weight = static_cast<const float*>(r.weight);
  const auto* bias = static_cast<const float*>(r.bias);
  emit<T>(r, h, [&](vf v, int64_t i, int64_t c) {
    vf y = (v - mean) * inverse;
    if (weight) y = y * column(weight, i, c);
    if (bias) y = y + column(bias, i, c);
    return y;
  });
}

void row_f64(const NormRow& r) {
  auto* h = static_cast<double*>(r.scratch);
  const auto *x = static_cast<const double*>(r.x),
             *residual = static_cast<const double*>(r.residual);
  const auto *weight = static_cast<const double*>(r.weight),
             *bias = static_cast<const double*>(r.bias);
  auto *y = static_cast<double*>(r.y), *sum = static_cast<double*>(r.sum);
  double total = 0, squares = 0;
  for (int64_t i = 0; i < r.n; ++i) {
    h[i] = x[i * r.x_stride] + (residual ? residual[i * r.residual_stride] : 0.0);
    if (sum) sum[i * r.sum_stride] = h[i];
    total += h[i];
  }
  const double mean = total / static_cast<double>(r.n);
  for (int64_t i = 0; i < r.n; ++i) squares += (h[i] - mean) * (h[i] - mean);
  const double inverse = 1.0 / __builtin_sqrt(squares / static_cast<double>(r.n) + r.eps);
  for (int64_t i = 0; i < r.n; ++i) {
    y[i * r.y_stride] =
        (h[i] - mean) * inverse * (weight ? weight[i] : 1.0) + (bias ? bias[i] : 0.0);
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

extern const NormTable layer_norm_table;
const NormTable layer_norm_table = {find, widen_any};

}  // namespace rm::cpu::RM_ISA
