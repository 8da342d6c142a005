// Cross entropy of a row: its maximum, the sum of exponentials; and (softmax - one-hot) * dloss.
#include "ops/cross_entropy/kernels.hpp"

#include "common/norm_vec.hpp"
#include "common/vec_math.hpp"

namespace rm::cpu::RM_ISA {
namespace {

template <class T>
const float* staged(const LossRow& r) {
  if (__is_same(T, float) && r.x_stride == 1) return static_cast<const float*>(r.x);
  auto* scratch = static_cast<float*>(r.scratch);
  widen_row(static_cast<const T*>(r.x), r.x_stride, scratch, r.n);
  return scratch;
}

constexpr float kLowest = -__builtin_inff();

template <class T>
void forward(LossRow& r) {
  const float* x = staged<T>(r);
  vf high = vset(kLowest), sums{};
  over_row(
      r.n, [&](int64_t i) { high = vmax(vload(x + i), high); },
      [&](int64_t i, int64_t c) { high = vmax(vload_part(x + i, c, kLowest), high); });
  const float most = vmax_of(high);
  over_row(
      r.n, [&](int64_t i) { sums += vexp_nonpositive(vload(x + i) - most); },
      [&](int64_t i, int64_t c) { sums += vexp_nonpositive(vload_part(x + i, c, kLowest) - most); });
  const float log = vlog(vset(vsum(sums)))[0];
  r.lse = most + log;
  r.loss = (most - x[r.target]) + log;  // not lse - x: that loses the logarithm in large logits
}

template <class T>
void backward(LossRow& r) {
  const float* x = staged<T>(r);
  const auto lse = static_cast<float>(r.lse), dloss = static_cast<float>(r.dloss);
  auto* dx = static_cast<T*>(r.dx);
  const float chosen = (vexp(vset(x[r.target]) - lse)[0] - 1.0f) * dloss;
  const auto store = [&](auto* to) {
    over_row(
        r.n, [&](int64_t i) { vstore(to + i, vexp(vload(x + i) - lse) * dloss); },
        [&](int64_t i, int64_t c) {
          vstore_part(to + i, vexp(vload_part(x + i, c) - lse) * dloss, c);
        });
  };
  if (r.dx_stride == 1) {
    store(dx);
  } else {
    auto* scratch = static_cast<float*>(r.scratch);
    store(scratch);
    narrow_row(scratch, dx, r.dx_stride, r.n);
  }
  narrow_row(&chosen, dx + r.target * r.dx_stride, 1, 1);
}

void forward_f64(LossRow& r) {
  const auto* x = static_cast<const double*>(r.x);
  double most = -__builtin_inf(), total = 0;
  for (int64_t i = 0; i < r.n; ++i) most = x[i * r.x_stride] > most ? x[i * r.x_stride] : most;
  for (int64_t i = 0; i < r.n; ++i) total += __builtin_exp(x[i * r.x_stride] - most);
  const double log = __builtin_log(total);
  r.lse = most + log;
  r.loss = (most - x[r.target * r.x_stride]) + log;
}

void backward_f64(LossRow& r) {
  const auto* x = static_cast<const double*>(r.x);
  auto* dx = static_cast<double*>(r.dx);
  for (int64_t i = 0; i < r.n; ++i) {
    const double hot = i == r.target ? 1.0 : 0.0;
    dx[i * r.dx_stride] = (__builtin_exp(x[i * r.x_stride] - r.lse) - hot) * r.dloss;
  }
}

LossFn find_forward(DType t) {
  switch (t) {
    case DType::f32:
      return forward<float>;
    case DType::bf16:
      return forward<bf16>;
    case DType::f16:
      return forward<f16>;
    case DType::f64:
      return forward_f64;
    default:
      return nullptr;
  }
}

LossFn find_backward(DType t) {
  switch (t) {
    case DType::f32:
      return backward<float>;
    case DType::bf16:
      return backward<bf16>;
    case DType::f16:
      return backward<f16>;
    case DType::f64:
      return backward_f64;
    default:
      return nullptr;
  }
}

}  // namespace

extern const LossTable loss_table;
const LossTable loss_table = {find_forward, find_backward};

}  // namespace rm::cpu::RM_ISA
