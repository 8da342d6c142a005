// Mean and scale of the row again, the two means of the gradient with what the row adds to the
// columns, then the store.
#include "ops/norm_backward/kernels.hpp"

#include "common/norm_vec.hpp"

namespace rm::cpu::RM_ISA {
namespace {

/// The row as f32: where it lies when it is dense f32, else in `scratch`.
template <class T>
const float* staged(const void* from, int64_t stride, int64_t n, float* scratch) {
  if (from == nullptr) return nullptr;
  if (__is_same(T, float) && stride == 1) return static_cast<const float*>(from);
  widen_row(static_cast<const T*>(from), stride, scratch, n);
  return scratch;
}

template <class T>
void row(const NormBackwardRow& r) {
  auto* scratch = static_cast<float*>(r.scratch);
  const int64_t n = r.n;
  const float* h = staged<T>(r.h, r.h_stride, n, scratch);
  const float* dy = staged<T>(r.dy, r.dy_stride, n, scratch + n);
  const float* sum = staged<T>(r.sum, r.sum_stride, n, scratch + 2 * n);
  const auto* weight = static_cast<const float*>(r.weight);
  auto *dweight = static_cast<float*>(r.dweight), *dbias = static_cast<float*>(r.dbias);
  const auto count = static_cast<float>(n), offset = static_cast<float>(r.weight_offset);
  const float mean = r.centred ? sum_row(h, n, [](vf v) { return v; }) / count : 0.0f;
  const float variance = sum_row(h, n, [mean](vf v) { return (v - mean) * (v - mean); }) / count;
  const float scale = 1.0f / __builtin_sqrtf(variance + static_cast<float>(r.eps));

  const auto gradient = [&](vf d, int64_t i, int64_t c) {
    return weight ? d * (column(weight, i, c) + offset) : d;
  };
  vf along{}, level{};
  over_row(
      n,
      [&](int64_t i) {
        const vf d = vload(dy + i), normal = (vload(h + i) - mean) * scale;
        const vf g = gradient(d, i, kWidth);
        along += g * normal;
        level += g;
        vstore(dweight + i, vload(dweight + i) + d * normal);
        vstore(dbias + i, vload(dbias + i) + d);
      },
      [&](int64_t i, int64_t c) {
        // Lanes behind the row have dy 0, and so add nothing.
        const vf d = vload_part(dy + i, c), normal = (vload_part(h + i, c) - mean) * scale;
        const vf g = gradient(d, i, c);
        along += g * normal;
        level += g;
        vstore_part(dweight + i, vload_part(dweight + i, c) + d * normal, c);
        vstore_part(dbias + i, vload_part(dbias + i, c) + d, c);
      });
  const float mean_along = vsum(along) / count, mean_g = r.centred ? vsum(level) / count : 0.0f;

  float* made = scratch + 3 * n;
  auto* dx = static_cast<T*>(r.dx);
  const auto result = [&](vf hv, vf d, vf more, int64_t i, int64_t c) {
    return more + (gradient(d, i, c) - mean_g - (hv - mean) * (scale * mean_along)) * scale;
  };
  const auto store = [&](auto* to) {
    over_row(
        n,
        [&](int64_t i) {
          const vf more = sum ? vload(sum + i) : vf{};
          vstore(to + i, result(vload(h + i), vload(dy + i), more, i, kWidth));
        },
        [&](int64_t i, int64_t c) {
          const vf more = sum ? vload_part(sum + i, c) : vf{};
          vstore_part(to + i, result(vload_part(h + i, c), vload_part(dy + i, c), more, i, c), c);
        });
  };
  if (r.dx_stride == 1) {
    store(dx);
  } else {
    store(made);
    narrow_row(made, dx, r.dx_stride, n);
  }
}

void row_f64(const NormBackwardRow& r) {
  const auto *dy = static_cast<const double*>(r.dy), *h = static_cast<const double*>(r.h),
             *sum = static_cast<const double*>(r.sum), *weight = static_cast<const double*>(r.weight);
  auto *dx = static_cast<double*>(r.dx), *dweight = static_cast<double*>(r.dweight),
       *dbias = static_cast<double*>(r.dbias);
  const auto count = static_cast<double>(r.n);
  double mean = 0, squares = 0, along = 0, level = 0;
  for (int64_t i = 0; r.centred && i < r.n; ++i) mean += h[i * r.h_stride] / count;
  for (int64_t i = 0; i < r.n; ++i) squares += (h[i * r.h_stride] - mean) * (h[i * r.h_stride] - mean);
  const double scale = 1.0 / __builtin_sqrt(squares / count + r.eps);
  auto* g = static_cast<double*>(r.scratch);
  auto* normal = g + r.n;
  for (int64_t i = 0; i < r.n; ++i) {
    const double d = dy[i * r.dy_stride];
    g[i] = weight ? d * (weight[i] + r.weight_offset) : d;
    normal[i] = (h[i * r.h_stride] - mean) * scale;
    along += g[i] * normal[i] / count;
    level += r.centred ? g[i] / count : 0.0;
    dweight[i] += d * normal[i];
    dbias[i] += d;
  }
  for (int64_t i = 0; i < r.n; ++i) {
    dx[i * r.dx_stride] = (sum ? sum[i * r.sum_stride] : 0.0) + scale * (g[i] - level - normal[i] * along);
  }
}

NormBackwardFn find(DType t) {
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

extern const NormBackwardTable norm_backward_table;
const NormBackwardTable norm_backward_table = {find};

}  // namespace rm::cpu::RM_ISA
