// softmax and log_softmax of one row: maximum, exponentials and their sum, scale.
#include "common/norm_vec.hpp"
#include "common/vec_math.hpp"

namespace rm::cpu::RM_ISA {
namespace {

float row_max(const float* h, int64_t n) {
  vf m = vset(-__builtin_inff());
  float tail = -__builtin_inff();
  over_row(
      n, [&](int64_t i) { m = vmax(vload(h + i), m); },
      [&](int64_t i, int64_t c) {
        for (int64_t k = i; k < i + c; ++k) tail = h[k] > tail ? h[k] : tail;
      });
  const float most = vmax_of(m);
  return most > tail ? most : tail;
}

// A row of NaNs leaves the maximum at -inf; the differences are NaN then, as they should be.
template <class T, bool kLog>
void row(const NormRow& r) {
  const float* h = stage<T>(r);
  auto* e = static_cast<float*>(r.scratch);
  const float most = row_max(h, r.n);
  vf sums{};
  float tail = 0;
  over_row(
      r.n,
      [&](int64_t i) {
        const vf v = vexp_nonpositive(vload(h + i) - most);
        if (!kLog) vstore(e + i, v);
        sums += v;
      },
      [&](int64_t i, int64_t c) {
        const vf v = vexp_nonpositive(vload_part(h + i, c) - most);
        if (!kLog) vstore_part(e + i, v, c);
        for (int64_t k = 0; k < c; ++k) tail += v[k];
      });
  const float total = vsum(sums) + tail;
  if (kLog) {
    const float shift = vlog(vset(total))[0];
    emit<T>(r, h, [&](vf v, int64_t, int64_t) { return (v - most) - shift; });
  } else {
    const float scale = 1.0f / total;
    emit<T>(r, e, [&](vf v, int64_t, int64_t) { return v * scale; });
  }
}

template <bool kLog>
void row_f64(const NormRow& r) {
  auto* e = static_cast<double*>(r.scratch);
  const auto* x = static_cast<const double*>(r.x);
  auto* y = static_cast<double*>(r.y);
  double most = -__builtin_inf(), total = 0;
  for (int64_t i = 0; i < r.n; ++i) most = x[i * r.x_stride] > most ? x[i * r.x_stride] : most;
  for (int64_t i = 0; i < r.n; ++i) {
    e[i] = __builtin_exp(x[i * r.x_stride] - most);
    total += e[i];
  }
  const double shift = __builtin_log(total);
  for (int64_t i = 0; i < r.n; ++i) {
    y[i * r.y_stride] = kLog ? x[i * r.x_stride] - most - shift : e[i] / total;
  }
}

template <bool kLog>
NormFn find(DType t) {
  switch (t) {
    case DType::f32:
      return row<float, kLog>;
    case DType::bf16:
      return row<bf16, kLog>;
    case DType::f16:
      return row<f16, kLog>;
    case DType::f64:
      return row_f64<kLog>;
    default:
      return nullptr;
  }
}

}  // namespace

extern const NormTable softmax_table;
extern const NormTable log_softmax_table;
const NormTable softmax_table = {find<false>, widen_any};
const NormTable log_softmax_table = {find<true>, widen_any};

}  // namespace rm::cpu::RM_ISA
