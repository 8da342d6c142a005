// Folds of reduce.  f32, bf16 and f16 sums run in f32 vectors over pieces of kReducePiece elements,
// whose totals are added in f64, so that long sums keep their digits.
#include "ops/reduce/kernels.hpp"

#include "common/vec.hpp"

namespace rm::cpu::RM_ISA {
namespace {

RM_INLINE double get(double v) { return v; }
RM_INLINE double get(float v) { return v; }
RM_INLINE double get(bf16 v) { return widen(v); }
RM_INLINE double get(f16 v) { return widen(v); }
RM_INLINE int64_t get(boolean v) { return v.value != 0; }
RM_INLINE int64_t get(int64_t v) { return v; }
RM_INLINE int64_t get(int32_t v) { return v; }
RM_INLINE int64_t get(int16_t v) { return v; }
RM_INLINE int64_t get(int8_t v) { return v; }
RM_INLINE int64_t get(uint8_t v) { return v; }

RM_INLINE double& slot(ReduceState* s, double) { return s->real; }
RM_INLINE int64_t& slot(ReduceState* s, int64_t) { return s->whole; }

RM_INLINE double plus(double a, double b) { return a + b; }
RM_INLINE int64_t plus(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
RM_INLINE double times(double a, double b) { return a * b; }
RM_INLINE int64_t times(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}

/// One element into the accumulator; NaN wins over every number and the first NaN stays.
template <ReduceKind kKind, class W>
RM_INLINE void fold(W v, int64_t index, ReduceState* s) {
  W& acc = slot(s, v);
  if constexpr (kKind == ReduceKind::sum || kKind == ReduceKind::mean) acc = plus(acc, v);
  if constexpr (kKind == ReduceKind::prod) acc = times(acc, v);
  if constexpr (kKind == ReduceKind::any) acc = (acc != 0) | (v != 0);
  if constexpr (kKind == ReduceKind::all) acc = (acc != 0) & (v != 0);
  if constexpr (kKind == ReduceKind::max) acc = acc != acc ? acc : (v > acc || v != v) ? v : acc;
  if constexpr (kKind == ReduceKind::min) acc = acc != acc ? acc : (v < acc || v != v) ? v : acc;
  if constexpr (kKind == ReduceKind::argmax || kKind == ReduceKind::argmin) {
    const bool better = kKind == ReduceKind::argmax ? v > acc : v < acc;
    if (s->index < 0 || (acc == acc && (better || v != v))) {
      acc = v;
      s->index = index;
    }
  }
}

template <class T, ReduceKind kKind>
void run(const void* px, int64_t stride, int64_t n, int64_t first, ReduceState* s) {
  const auto* x = static_cast<const T*>(px);
  for (int64_t i = 0; i < n; ++i) fold<kKind>(get(x[i * stride]), first + i, s);
}

template <ReduceKind kKind>
RM_INLINE vf combine(vf acc, vf v) {
  if constexpr (kKind == ReduceKind::sum || kKind == ReduceKind::mean) return acc + v;
  const vf chosen = kKind == ReduceKind::max ? (v > acc ? v : acc) : (v < acc ? v : acc);
  return (v != v) ? v : (acc != acc) ? acc : chosen;
}
template <ReduceKind kKind>
constexpr float kIdentity = kKind == ReduceKind::max   ? -__builtin_inff()
                            : kKind == ReduceKind::min ? __builtin_inff()
                                                       : 0.0f;

/// sum, mean, max and min of the f32 class where elements are dense.
template <class T, ReduceKind kKind>
void run_fast(const void* px, int64_t stride, int64_t n, int64_t first, ReduceState* s) {
  if (stride != 1 || n < 2 * kWidth) return run<T, kKind>(px, stride, n, first, s);
  const auto* x = static_cast<const T*>(px);
  for (int64_t from = 0; from < n; from += kReducePiece) {
    const int64_t to = imin(n, from + kReducePiece);
    vf acc[4];
    for (vf& a : acc) a = vset(kIdentity<kKind>);
    int64_t i = from;
    for (; i + 4 * kWidth <= to; i += 4 * kWidth) {
      for (int k = 0; k < 4; ++k) acc[k] = combine<kKind>(acc[k], vload(x + i + k * kWidth));
    }
    for (; i + kWidth <= to; i += kWidth) acc[0] = combine<kKind>(acc[0], vload(x + i));
    const vf all = combine<kKind>(combine<kKind>(acc[0], acc[1]), combine<kKind>(acc[2], acc[3]));
    for (int k = 0; k < kWidth; ++k) fold<kKind>(static_cast<double>(all[k]), 0, s);
    for (; i < to; ++i) fold<kKind>(get(x[i]), 0, s);
  }
}

template <class T, ReduceKind kKind>
void run_columns(const void* px, int64_t row_stride, int64_t rows, int64_t columns, float* acc) {
  const auto* x = static_cast<const T*>(px);
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = x + r * row_stride;
    int64_t i = 0;
    for (; i + kWidth <= columns; i += kWidth) {
      vstore(acc + i, combine<kKind>(vload(acc + i), vload(row + i)));
    }
    if (i < columns) {
      const int64_t c = columns - i;
      vstore_part(acc + i, combine<kKind>(vload_part(acc + i, c), vload_part(row + i, c)), c);
    }
  }
}

template <class T>
ReduceFn plain(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::sum:
      return run<T, ReduceKind::sum>;
    case ReduceKind::mean:
      return run<T, ReduceKind::mean>;
    case ReduceKind::max:
      return run<T, ReduceKind::max>;
    case ReduceKind::min:
      return run<T, ReduceKind::min>;
    case ReduceKind::prod:
      return run<T, ReduceKind::prod>;
    case ReduceKind::any:
      return run<T, ReduceKind::any>;
    case ReduceKind::all:
      return run<T, ReduceKind::all>;
    case ReduceKind::argmax:
      return run<T, ReduceKind::argmax>;
    case ReduceKind::argmin:
      return run<T, ReduceKind::argmin>;
  }
  return nullptr;
}

template <class T>
ReduceFn fast(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::sum:
      return run_fast<T, ReduceKind::sum>;
    case ReduceKind::mean:
      return run_fast<T, ReduceKind::mean>;
    case ReduceKind::max:
      return run_fast<T, ReduceKind::max>;
    case ReduceKind::min:
      return run_fast<T, ReduceKind::min>;
    default:
      return plain<T>(kind);
  }
}

ReduceFn find(DType t, ReduceKind kind) {
  switch (t) {
    case DType::f32:
      return fast<float>(kind);
    case DType::bf16:
      return fast<bf16>(kind);
    case DType::f16:
      return fast<f16>(kind);
    case DType::f64:
      return plain<double>(kind);
    case DType::i64:
      return plain<int64_t>(kind);
    case DType::i32:
      return plain<int32_t>(kind);
    case DType::i16:
      return plain<int16_t>(kind);
    case DType::i8:
      return plain<int8_t>(kind);
    case DType::u8:
      return plain<uint8_t>(kind);
    case DType::boolean:
      return plain<boolean>(kind);
    default:
      return nullptr;
  }
}

template <class T>
ReduceColumnsFn columns_of(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::sum:
      return run_columns<T, ReduceKind::sum>;
    case ReduceKind::mean:
      return run_columns<T, ReduceKind::mean>;
    case ReduceKind::max:
      return run_columns<T, ReduceKind::max>;
    case ReduceKind::min:
      return run_columns<T, ReduceKind::min>;
    default:
      return nullptr;
  }
}

ReduceColumnsFn columns(DType t, ReduceKind kind) {
  switch (t) {
    case DType::f32:
      return columns_of<float>(kind);
    case DType::bf16:
      return columns_of<bf16>(kind);
    case DType::f16:
      return columns_of<f16>(kind);
    default:
      return nullptr;
  }
}

}  // namespace

extern const ReduceTable reduce_table;
const ReduceTable reduce_table = {find, columns};

}  // namespace rm::cpu::RM_ISA
