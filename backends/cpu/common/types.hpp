// Plain types shared by row sources and ISA sources.  No functions: nothing here can be emitted
// twice with different instruction sets.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rm::cpu {

enum class DType : uint8_t {
  f32,
  f64,
  bf16,
  f16,
  i64,
  i32,
  i16,
  i8,
  u8,
  boolean,
  u16,
  u32,
  u64,
  invalid
};

// Storage types, so that templates can tell bf16 from f16 from i16.
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
struct boolean {
  uint8_t value;
};

}  // namespace rm::cpu
