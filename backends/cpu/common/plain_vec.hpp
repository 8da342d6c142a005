// Conversions of bf16 and f16 for row sources: common/vec.hpp at the plain level, in a namespace of
// its own so that it never meets an ISA source's.
#pragma once

#define RM_ISA plain
#define RM_ISA_LEVEL 0
#include <cmath>
#include <stdexcept>
#include <type_traits>

#include "common/vec.hpp"

namespace rm::cpu {

template <class T>
inline constexpr bool kIsFloat =
    std::is_floating_point_v<T> || std::is_same_v<T, bf16> || std::is_same_v<T, f16>;

/// What elements of T are computed in when speed does not matter: double or int64_t.
template <class T>
using Wide = std::conditional_t<kIsFloat<T>, double, int64_t>;

template <class T>
Wide<T> get(T v) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) {
    return plain::widen(v);
  } else if constexpr (std::is_same_v<T, boolean>) {
    return v.value != 0;
  } else {
    return v;
  }
}

template <class T, class W>
void put(W v, T* p) {
  if constexpr (std::is_same_v<T, bf16> || std::is_same_v<T, f16>) {
    plain::narrow(static_cast<float>(v), p);
  } else if constexpr (std::is_same_v<T, boolean>) {
    p->value = v != 0;
  } else {
    *p = static_cast<T>(v);
  }
}

/// f(T{}) for the storage type of `t`.
template <class F>
auto visit(DType t, F&& f) {
  switch (t) {
    case DType::f32:
      return f(float{});
    case DType::f64:
      return f(double{});
    case DType::bf16:
      return f(bf16{});
    case DType::f16:
      return f(f16{});
    case DType::i64:
      return f(int64_t{});
    case DType::i32:
      return f(int32_t{});
    case DType::i16:
      return f(int16_t{});
    case DType::i8:
      return f(int8_t{});
    case DType::u8:
      return f(uint8_t{});
    case DType::u16:
      return f(uint16_t{});
    case DType::u32:
      return f(uint32_t{});
    case DType::boolean:
      return f(boolean{});
    default:
      throw std::invalid_argument("[dtype] expected a type of docs/operators.md, got another");
  }
}

/// f(T{}) for an unsigned type of `bytes` bytes: moves that do not look at values.
template <class F>
void visit_bytes(int64_t bytes, F&& f) {
  switch (bytes) {
    case 1:
      return f(uint8_t{});
    case 2:
      return f(uint16_t{});
    case 4:
      return f(uint32_t{});
    default:
      return f(uint64_t{});
  }
}

}  // namespace rm::cpu
