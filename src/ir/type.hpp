// Element types and tensor types.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "ir/dim.hpp"
#include "rm/backend.h"

namespace rm::ir {

// u64 is moved, cast, compared for equality and wraps in sums and products; what orders or divides
// it is refused by inference (ops/infer.hpp), since registers and folding hold integers as i64.
enum class DType : uint8_t {
  kF32,
  kF64,
  kBF16,
  kF16,
  kI64,
  kI32,
  kI16,
  kI8,
  kU8,
  kBool,
  kU16,
  kU32,
  kU64,
};

/// "f32", "bf16", "i64", "bool" ...
std::string_view name(DType dtype);
/// Throws rm::Error(RM_INVALID_ARGUMENT) naming the accepted values.
DType parse_dtype(std::string_view text);
size_t size_bytes(DType dtype);
bool is_floating(DType dtype);
DLDataType to_dlpack(DType dtype);
/// False when the IR has no such element type.
bool from_dlpack(DLDataType dl, DType* out);

struct TensorType {
  DType dtype = DType::kF32;
  Dims dims;

  size_t rank() const { return dims.size(); }
  bool is_static() const;
  /// Throw when symbolic, and as ir/byte_count.hpp does.
  int64_t num_elements() const;
  int64_t num_bytes() const;
  std::string str() const;  // "f32[s0,384]"
  friend bool operator==(const TensorType&, const TensorType&) = default;
};

}  // namespace rm::ir
