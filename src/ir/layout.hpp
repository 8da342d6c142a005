// A concrete strided layout (dtype, dims, strides in elements) and the view algebra on it:
// reshape, permute, expand and slice without moving data.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "ir/type.hpp"

namespace rm::ir {

using Ints = std::vector<int64_t>;

struct Layout {
  DType dtype = DType::kF32;
  Ints dims;
  Ints strides;        // elements, same length as dims
  int64_t offset = 0;  // elements from the start of the buffer

  bool is_empty() const;
  int64_t num_elements() const;  // throws as ir/byte_count.hpp does
  int64_t num_bytes() const;
  bool is_contiguous() const;  // row-major; strides of dims of size 1 do not matter
  friend bool operator==(const Layout&, const Layout&) = default;
};

/// Throws rm::Error when the strides do not fit 63 bits.
Ints contiguous_strides(const Ints& dims);
/// Contiguous layout of a static type at offset 0.
Layout contiguous(const TensorType& type);
Layout contiguous(DType dtype, Ints dims);

/// View with new dims (same element count), or nothing when the strides do not allow it.
std::optional<Layout> view_reshape(const Layout& layout, const Ints& dims);
Layout view_permute(const Layout& layout, const Ints& axes);
/// numpy broadcasting to `dims`; new and size-1 axes get stride 0. Dims must be compatible.
Layout view_expand(const Layout& layout, const Ints& dims);
Layout view_slice(const Layout& layout, size_t axis, int64_t start, int64_t stop, int64_t step);

/// Static dims of a type as integers; throws rm::Error when symbolic.
Ints static_dims(const Dims& dims);

}  // namespace rm::ir
