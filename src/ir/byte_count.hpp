// How much memory a shape takes: the one place where sizes are multiplied.
#pragma once

#include <cstdint>
#include <span>

#include "ir/type.hpp"

namespace rm::ir {

/// No tensor is larger: more than processors address, and so little that sums over all tensors of a
/// program stay below 2^63.
inline constexpr int64_t kMaxBytes = int64_t{1} << 47;

/// Elements of a shape; throws rm::Error(RM_RESOURCE_EXHAUSTED) when a dimension is negative or the
/// elements, at one byte each, would be more than kMaxBytes.
int64_t num_elements(std::span<const int64_t> dims);
/// The same in bytes.
int64_t num_bytes(std::span<const int64_t> dims, DType dtype);

}  // namespace rm::ir
