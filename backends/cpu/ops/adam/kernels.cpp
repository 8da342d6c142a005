// Adam's update at one level: a plain loop that the compiler vectorises.
#include "ops/adam/kernels.hpp"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace rm::cpu::RM_ISA {
namespace {

// Moments of a gradient that vanished decay into numbers that are slow to compute with. Below this
// eps they could be seen in the parameter (decision 0140).
constexpr float kLeastEps = 1e-10f;

/// While it lives, results and operands below the smallest normal number are zero.
class SmallIsZero {
 public:
#if defined(__SSE2__)
  explicit SmallIsZero(bool on) : before_(_mm_getcsr()) {
    if (on) _mm_setcsr(before_ | 0x8040);  // flush to zero, denormals are zero
  }
  ~SmallIsZero() { _mm_setcsr(before_); }
#else
  explicit SmallIsZero(bool) {}
#endif
  SmallIsZero(const SmallIsZero&) = delete;
  SmallIsZero& operator=(const SmallIsZero&) = delete;

 private:
#if defined(__SSE2__)
  unsigned before_;
#endif
};

template <class T>
struct Numbers {
  T decay, keep, new1, old2, new2, eps, step, inverse_root;
};

template <class T>
Numbers<T> numbers_of(const AdamArgs& a) {
  const auto* x = static_cast<const T*>(a.numbers);
  const int64_t s = a.number_step;
  return {x[kDecay * s], x[kKeep * s], x[kNew1 * s], x[kOld2 * s],
          x[kNew2 * s],  x[kEps * s],  x[kStep * s], T(1) / x[kRoot * s]};
}

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

template <class T, AdamDecay kHow, bool kLargestKept, bool kDense>
void run(const AdamArgs& a, const Numbers<T>& by) {
  const auto* p = static_cast<const T*>(a.pointer[kParameter]);
  const auto* g = static_cast<const T*>(a.pointer[kGradient]);
  const auto* m = static_cast<const T*>(a.pointer[kMean]);
  const auto* v = static_cast<const T*>(a.pointer[kSquare]);
  const auto* most = static_cast<const T*>(a.pointer[kLargest]);
  auto *new_p = static_cast<T*>(a.pointer[kNewParameter]), *new_m = static_cast<T*>(a.pointer[kNewMean]),
       *new_v = static_cast<T*>(a.pointer[kNewSquare]), *new_most = static_cast<T*>(a.pointer[kNewLargest]);
  const Numbers<T> c = by;
  const T sign = a.maximize ? T(-1) : T(1);
  const int64_t* step = a.step;
  const auto at = [&](int which, int64_t i) { return kDense ? i : i * step[which]; };
  // A result may be the operand it replaces, element for element, which is what ivdep states.
#pragma GCC ivdep
  for (int64_t i = 0; i < a.n; ++i) {
    T parameter = p[at(kParameter, i)], gradient = g[at(kGradient, i)] * sign;
    if constexpr (kHow == AdamDecay::parameter) parameter *= c.keep;
    if constexpr (kHow == AdamDecay::gradient) gradient += parameter * c.decay;
    const T mean = m[at(kMean, i)] + (gradient - m[at(kMean, i)]) * c.new1;
    const T square = v[at(kSquare, i)] * c.old2 + gradient * gradient * c.new2;
    new_m[at(kNewMean, i)] = mean;
    new_v[at(kNewSquare, i)] = square;
    T second = square;
    if constexpr (kLargestKept) {
      const T before = most[at(kLargest, i)];
      second = (before > square) | (before != before) ? before : square;
      new_most[at(kNewLargest, i)] = second;
    }
    new_p[at(kNewParameter, i)] = parameter - mean / (root(second) * c.inverse_root + c.eps) * c.step;
  }
}

template <class T, AdamDecay kHow>
void choose(const AdamArgs& a, const Numbers<T>& by) {
  bool dense = true;
  for (int i = 0; i < kAdamPointers; ++i) dense = dense && (a.pointer[i] == nullptr || a.step[i] == 1);
  const bool kept = a.pointer[kLargest] != nullptr;
  if (dense) return kept ? run<T, kHow, true, true>(a, by) : run<T, kHow, false, true>(a, by);
  return kept ? run<T, kHow, true, false>(a, by) : run<T, kHow, false, false>(a, by);
}

template <class T>
void any(const AdamArgs& a, const Numbers<T>& by) {
  switch (a.decay) {
    case AdamDecay::none:
      return choose<T, AdamDecay::none>(a, by);
    case AdamDecay::gradient:
      return choose<T, AdamDecay::gradient>(a, by);
    case AdamDecay::parameter:
      return choose<T, AdamDecay::parameter>(a, by);
  }
}

void f32(const AdamArgs& a) {
  const Numbers<float> by = numbers_of<float>(a);
  const SmallIsZero guard(by.eps >= kLeastEps);
  any<float>(a, by);
}

void f64(const AdamArgs& a) { any<double>(a, numbers_of<double>(a)); }

}  // namespace

extern const AdamTable adam_table;
const AdamTable adam_table = {f32, f64};

}  // namespace rm::cpu::RM_ISA
