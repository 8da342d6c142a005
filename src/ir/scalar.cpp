// Element conversions by the IEEE 754 bit layouts; used by literals, references and folding only.
#include "ir/scalar.hpp"

#include <bit>
#include <cmath>
#include <cstring>

namespace rm::ir {
namespace {

template <typename T>
T load(const void* p) {
  T v;
  std::memcpy(&v, p, sizeof(T));
  return v;
}
template <typename T>
void store(void* p, T v) {
  std::memcpy(p, &v, sizeof(T));
}
// Out-of-range float to int is undefined in C++; x86 hardware and torch give the minimum.
int64_t to_int(double v) {
  if (!(v > -9.3e18 && v < 9.2233720368547748e18)) return INT64_MIN;
  return static_cast<int64_t>(v);
}
// Negative values wrap, as those of narrower types do.
uint64_t to_unsigned(double v) {
  if (v >= 0x1p63 && v < 0x1p64) return static_cast<uint64_t>(v);
  return static_cast<uint64_t>(to_int(v));
}

}  // namespace

float bf16_to_float(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

uint16_t float_to_bf16(float value) {
  uint32_t u = std::bit_cast<uint32_t>(value);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

float f16_to_float(uint16_t bits) {
  uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  uint32_t exponent = (bits >> 10) & 0x1fu, mantissa = bits & 0x3ffu;
  if (exponent == 0x1fu) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    float magnitude = std::ldexp(static_cast<float>(mantissa), -24);
    return sign != 0 ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
}

uint16_t float_to_f16(float value) {
  uint32_t u = std::bit_cast<uint32_t>(value);
  uint16_t sign = static_cast<uint16_t>((u >> 16) & 0x8000u);
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return sign | 0x7e00u;
  if (u >= 0x477ff000u) return sign | 0x7c00u;  // rounds past 65504
  if (u < 0x38800000u) {                        // subnormal or zero
    double scaled = std::ldexp(static_cast<double>(std::bit_cast<float>(u)), 24);
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(scaled)));
  }
  u += 0xfffu + ((u >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((u - 0x38000000u) >> 13));
}

double load_element(DType dtype, const void* p) {
  switch (dtype) {
    case DType::kF32: return load<float>(p);
    case DType::kF64: return load<double>(p);
    case DType::kBF16: return bf16_to_float(load<uint16_t>(p));
    case DType::kF16: return f16_to_float(load<uint16_t>(p));
    case DType::kU64: return static_cast<double>(load<uint64_t>(p));
    default: return static_cast<double>(load_int(dtype, p));
  }
}

void store_element(DType dtype, void* p, double v) {
  switch (dtype) {
    case DType::kF32: return store(p, static_cast<float>(v));
    case DType::kF64: return store(p, v);
    case DType::kBF16: return store(p, float_to_bf16(static_cast<float>(v)));
    case DType::kF16: return store(p, float_to_f16(static_cast<float>(v)));
    case DType::kBool: return store(p, static_cast<uint8_t>(v != 0));
    case DType::kU64: return store(p, to_unsigned(v));
    default: return store_int(dtype, p, to_int(v));
  }
}

int64_t load_int(DType dtype, const void* p) {
  switch (dtype) {
    case DType::kI64: return load<int64_t>(p);
    case DType::kI32: return load<int32_t>(p);
    case DType::kI16: return load<int16_t>(p);
    case DType::kI8: return load<int8_t>(p);
    case DType::kU8: return load<uint8_t>(p);
    case DType::kU16: return load<uint16_t>(p);
    case DType::kU32: return load<uint32_t>(p);
    case DType::kU64: return static_cast<int64_t>(load<uint64_t>(p));
    case DType::kBool: return load<uint8_t>(p) != 0 ? 1 : 0;
    default: return to_int(load_element(dtype, p));
  }
}

void store_int(DType dtype, void* p, int64_t v) {
  switch (dtype) {
    case DType::kI64: return store(p, v);
    case DType::kI32: return store(p, static_cast<int32_t>(v));
    case DType::kI16: return store(p, static_cast<int16_t>(v));
    case DType::kI8: return store(p, static_cast<int8_t>(v));
    case DType::kU8: return store(p, static_cast<uint8_t>(v));
    case DType::kU16: return store(p, static_cast<uint16_t>(v));
    case DType::kU32: return store(p, static_cast<uint32_t>(v));
    case DType::kU64: return store(p, static_cast<uint64_t>(v));
    case DType::kBool: return store(p, static_cast<uint8_t>(v != 0));
    default: return store_element(dtype, p, static_cast<double>(v));
  }
}

}  // namespace rm::ir
