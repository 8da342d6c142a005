// A contiguous tensor in host memory: what references compute on. Types are static.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ir/type.hpp"

namespace rm::ops {

struct HostTensor {
  ir::TensorType type;
  std::string bytes;  // contiguous, little endian, type.num_bytes() of them

  int64_t size() const { return type.num_elements(); }
  const char* at(int64_t i) const {
    return bytes.data() + static_cast<size_t>(i) * ir::size_bytes(type.dtype);
  }
  char* at(int64_t i) { return bytes.data() + static_cast<size_t>(i) * ir::size_bytes(type.dtype); }
};

HostTensor zeros(const ir::TensorType& type);
/// Every element as double (integers beyond 2^53 lose bits: use to_ints).
std::vector<double> to_doubles(const HostTensor& tensor);
std::vector<int64_t> to_ints(const HostTensor& tensor);
/// Rounds each value to the type once.
HostTensor from_doubles(const ir::TensorType& type, const std::vector<double>& values);
HostTensor from_ints(const ir::TensorType& type, const std::vector<int64_t>& values);

/// The integers of static dims.
std::vector<int64_t> sizes(const ir::Dims& dims);
std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes);
/// Offset of every element of a strided view, in row-major order of `sizes`.
std::vector<int64_t> strided_offsets(const std::vector<int64_t>& sizes,
                                     const std::vector<int64_t>& strides, int64_t base = 0);
/// Offsets into a contiguous tensor of shape `from` broadcast to `to`.
std::vector<int64_t> broadcast_offsets(const ir::Dims& from, const ir::Dims& to);
/// result[i] = source[offsets[i]]; both have one element type.
HostTensor take(const HostTensor& source, const ir::TensorType& result,
                const std::vector<int64_t>& offsets);

/// The shape seen as [outer, axis, inner].
struct AxisSplit {
  int64_t outer, size, inner;
};
AxisSplit split_at(const ir::Dims& dims, size_t axis);

}  // namespace rm::ops
