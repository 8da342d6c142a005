// Conversions of the ewise interpreter: storage types to classes and back, and between classes.
#include "common/vec.hpp"
#include "ops/ewise/isa_tables.hpp"

namespace rm::cpu::RM_ISA {
namespace {

RM_INLINE double widen(double v) { return v; }
RM_INLINE int64_t widen(int64_t v) { return v; }
RM_INLINE int64_t widen(int32_t v) { return v; }
RM_INLINE int64_t widen(int16_t v) { return v; }
RM_INLINE int64_t widen(int8_t v) { return v; }
RM_INLINE int64_t widen(uint8_t v) { return v; }
RM_INLINE int64_t widen(uint16_t v) { return v; }
RM_INLINE int64_t widen(uint32_t v) { return v; }
RM_INLINE uint64_t widen(uint64_t v) { return v; }
RM_INLINE int64_t widen(boolean v) { return v.value != 0; }
using RM_ISA::widen;

template <class T, class C>
void load(void* dst, const void* src, int64_t stride, int64_t n) {
  auto* d = static_cast<C*>(dst);
  const auto* s = static_cast<const T*>(src);
  if (stride == 0) {
    const C value = static_cast<C>(widen(s[0]));
    for (int64_t i = 0; i < n; ++i) d[i] = value;
  } else if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) d[i] = static_cast<C>(widen(s[i]));
  } else {
    for (int64_t i = 0; i < n; ++i) d[i] = static_cast<C>(widen(s[i * stride]));
  }
}

/// f32, bf16 and f16 to f32, vectorised.
template <class T>
void load_f32(void* dst, const void* src, int64_t stride, int64_t n) {
  auto* d = static_cast<float*>(dst);
  const auto* s = static_cast<const T*>(src);
  if (stride == 0) {
    const float value = RM_ISA::widen(s[0]);
    for (int64_t i = 0; i < n; ++i) d[i] = value;
  } else {
    widen_row(s, stride, d, n);
  }
}

template <class C>
RM_INLINE void put(C v, double* p) {
  *p = static_cast<double>(v);
}
template <class C>
RM_INLINE void put(C v, float* p) {
  *p = static_cast<float>(v);
}
template <class C>
RM_INLINE void put(C v, bf16* p) {
  narrow(static_cast<float>(v), p);
}
template <class C>
RM_INLINE void put(C v, f16* p) {
  narrow(static_cast<float>(v), p);
}
template <class C>
RM_INLINE void put(C v, boolean* p) {
  p->value = v != 0;
}
// To integers by way of i64, so that small types wrap instead of saturating.
template <class C>
RM_INLINE void put(C v, int64_t* p) {
  *p = static_cast<int64_t>(v);
}
template <class C>
RM_INLINE void put(C v, int32_t* p) {
  *p = static_cast<int32_t>(static_cast<int64_t>(v));
}
template <class C>
RM_INLINE void put(C v, int16_t* p) {
  *p = static_cast<int16_t>(static_cast<int64_t>(v));
}
template <class C>
RM_INLINE void put(C v, int8_t* p) {
  *p = static_cast<int8_t>(static_cast<int64_t>(v));
}
template <class C>
RM_INLINE void put(C v, uint8_t* p) {
  *p = static_cast<uint8_t>(static_cast<int64_t>(v));
}
template <class C>
RM_INLINE void put(C v, uint16_t* p) {
  *p = static_cast<uint16_t>(static_cast<int64_t>(v));
}
template <class C>
RM_INLINE void put(C v, uint32_t* p) {
  *p = static_cast<uint32_t>(static_cast<int64_t>(v));
}
RM_INLINE void put(int64_t v, uint64_t* p) { *p = static_cast<uint64_t>(v); }
// Floats from 2^63 on are no i64.
template <class C>
RM_INLINE void put(C v, uint64_t* p) {
  const C half = static_cast<C>(0x1p63);
  const auto bits = static_cast<uint64_t>(static_cast<int64_t>(v >= half ? v - half : v));
  *p = v >= half ? bits ^ (uint64_t{1} << 63) : bits;
}

template <class C, class T>
void store(const void* src, void* dst, int64_t stride, int64_t n) {
  const auto* s = static_cast<const C*>(src);
  auto* d = static_cast<T*>(dst);
  if (stride == 1) {
    for (int64_t i = 0; i < n; ++i) put(s[i], d + i);
  } else {
    for (int64_t i = 0; i < n; ++i) put(s[i], d + i * stride);
  }
}

template <class T>
void store_f32(const void* src, void* dst, int64_t stride, int64_t n) {
  narrow_row(static_cast<const float*>(src), static_cast<T*>(dst), stride, n);
}

template <class From, class To>
void convert(void* dst, const void* src, const void*, const void*, int64_t n) {
  auto* d = static_cast<To*>(dst);
  const auto* s = static_cast<const From*>(src);
  for (int64_t i = 0; i < n; ++i) d[i] = static_cast<To>(s[i]);
}

template <class C>
EwiseLoad load_of(DType from) {
  switch (from) {
    case DType::f32:
      return load<float, C>;
    case DType::f64:
      return load<double, C>;
    case DType::bf16:
      return load<bf16, C>;
    case DType::f16:
      return load<f16, C>;
    case DType::i64:
      return load<int64_t, C>;
    case DType::i32:
      return load<int32_t, C>;
    case DType::i16:
      return load<int16_t, C>;
    case DType::i8:
      return load<int8_t, C>;
    case DType::u8:
      return load<uint8_t, C>;
    case DType::u16:
      return load<uint16_t, C>;
    case DType::u32:
      return load<uint32_t, C>;
    case DType::u64:
      return load<uint64_t, C>;
    case DType::boolean:
      return load<boolean, C>;
    default:
      return nullptr;
  }
}

template <class C>
EwiseStore store_of(DType to) {
  switch (to) {
    case DType::f32:
      return store<C, float>;
    case DType::f64:
      return store<C, double>;
    case DType::bf16:
      return store<C, bf16>;
    case DType::f16:
      return store<C, f16>;
    case DType::i64:
      return store<C, int64_t>;
    case DType::i32:
      return store<C, int32_t>;
    case DType::i16:
      return store<C, int16_t>;
    case DType::i8:
      return store<C, int8_t>;
    case DType::u8:
      return store<C, uint8_t>;
    case DType::u16:
      return store<C, uint16_t>;
    case DType::u32:
      return store<C, uint32_t>;
    case DType::u64:
      return store<C, uint64_t>;
    case DType::boolean:
      return store<C, boolean>;
    default:
      return nullptr;
  }
}

}  // namespace

EwiseLoad find_load(DType from, Class to) {
  if (to == Class::f64) return load_of<double>(from);
  if (to == Class::i64) return load_of<int64_t>(from);
  if (from == DType::f32) return load_f32<float>;
  if (from == DType::bf16) return load_f32<bf16>;
  if (from == DType::f16) return load_f32<f16>;
  return load_of<float>(from);
}

EwiseStore find_store(Class from, DType to) {
  if (from == Class::f64) return store_of<double>(to);
  if (from == Class::i64) return store_of<int64_t>(to);
  if (to == DType::f32) return store_f32<float>;
  if (to == DType::bf16) return store_f32<bf16>;
  if (to == DType::f16) return store_f32<f16>;
  return store_of<float>(to);
}

EwiseFn find_convert(Class from, Class to) {
  switch (static_cast<int>(from) * 3 + static_cast<int>(to)) {
    case 1:
      return convert<float, double>;
    case 2:
      return convert<float, int64_t>;
    case 3:
      return convert<double, float>;
    case 5:
      return convert<double, int64_t>;
    case 6:
      return convert<int64_t, float>;
    case 7:
      return convert<int64_t, double>;
    default:
      return nullptr;
  }
}

namespace {
EwiseFn find(int opcode, Class cls) {
  return cls == Class::f32   ? find_f32(opcode)
         : cls == Class::f64 ? find_f64(opcode)
                             : find_i64(opcode);
}
}  // namespace

extern const EwiseTable ewise_table;
const EwiseTable ewise_table = {find, find_convert, find_load, find_store, find_gelu_slope};

}  // namespace rm::cpu::RM_ISA
