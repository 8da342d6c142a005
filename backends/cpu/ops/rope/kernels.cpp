// rope of one row.  Both elements of a pair are read before either is written, so y may be x.
#include "ops/rope/kernels.hpp"

#include "common/vec.hpp"

namespace rm::cpu::RM_ISA {
namespace {

RM_INLINE double widen(double v) { return v; }
using RM_ISA::widen;
RM_INLINE void narrow(double v, double* p) { *p = v; }
using RM_ISA::narrow;

template <class T, class C, class Acc>
RM_INLINE void pair(const RopeRow& r, int64_t first, int64_t second) {
  const auto* x = static_cast<const T*>(r.x);
  const auto *cos = static_cast<const C*>(r.cos), *sin = static_cast<const C*>(r.sin);
  auto* y = static_cast<T*>(r.y);
  const Acc a = widen(x[first * r.x_stride]), b = widen(x[second * r.x_stride]);
  const Acc ya = a * static_cast<Acc>(widen(cos[first * r.cos_stride])) -
                 b * static_cast<Acc>(widen(sin[first * r.sin_stride]));
  const Acc yb = b * static_cast<Acc>(widen(cos[second * r.cos_stride])) +
                 a * static_cast<Acc>(widen(sin[second * r.sin_stride]));
  narrow(ya, y + first * r.y_stride);
  narrow(yb, y + second * r.y_stride);
}

template <class T, class C, class Acc>
void interleaved(const RopeRow& r) {
  for (int64_t i = 0; i + 1 < r.n; i += 2) pair<T, C, Acc>(r, i, i + 1);
}

template <class T, class C, class Acc>
void halves_plain(const RopeRow& r, int64_t from) {
  const int64_t half = r.n / 2;
  for (int64_t i = from; i < half; ++i) pair<T, C, Acc>(r, i, i + half);
}

template <class T, class C>
void halves(const RopeRow& r) {
  int64_t i = 0;
  const int64_t half = r.n / 2;
  if (r.x_stride == 1 && r.y_stride == 1 && r.cos_stride == 1 && r.sin_stride == 1) {
    const auto* x = static_cast<const T*>(r.x);
    const auto *cos = static_cast<const C*>(r.cos), *sin = static_cast<const C*>(r.sin);
    auto* y = static_cast<T*>(r.y);
    for (; i + kWidth <= half; i += kWidth) {
      const vf a = vload(x + i), b = vload(x + i + half);
      const vf ya = a * vload(cos + i) - b * vload(sin + i);
      const vf yb = b * vload(cos + i + half) + a * vload(sin + i + half);
      vstore(y + i, ya);
      vstore(y + i + half, yb);
    }
  }
  halves_plain<T, C, float>(r, i);
}

void halves_f64(const RopeRow& r) { halves_plain<double, double, double>(r, 0); }

template <class T, class C>
RopeFn pick(bool is_interleaved) {
  return is_interleaved ? interleaved<T, C, float> : halves<T, C>;
}

template <class T>
RopeFn by_cos(DType cos, bool is_interleaved) {
  switch (cos) {
    case DType::f32:
      return pick<T, float>(is_interleaved);
    case DType::bf16:
      return pick<T, bf16>(is_interleaved);
    case DType::f16:
      return pick<T, f16>(is_interleaved);
    default:
      return nullptr;
  }
}

RopeFn find(DType x, DType cos, bool is_interleaved) {
  switch (x) {
    case DType::f32:
      return by_cos<float>(cos, is_interleaved);
    case DType::bf16:
      return by_cos<bf16>(cos, is_interleaved);
    case DType::f16:
      return by_cos<f16>(cos, is_interleaved);
    case DType::f64:
      if (cos != DType::f64) return nullptr;
      return is_interleaved ? interleaved<double, double, double> : halves_f64;
    default:
      return nullptr;
  }
}

}  // namespace

extern const RopeTable rope_table;
const RopeTable rope_table = {find};

}  // namespace rm::cpu::RM_ISA
