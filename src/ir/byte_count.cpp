// Saturates first, so that a dimension of 0 empties a shape whatever the others are.
#include "ir/byte_count.hpp"

#include <algorithm>
#include <string>

#include "base/error.hpp"

namespace rm::ir {
namespace {

int64_t checked(std::span<const int64_t> dims, int64_t item, std::string_view unit) {
  int64_t total = item;
  bool fits = true;
  for (int64_t d : dims) {
    fits = fits && d >= 0 && !__builtin_mul_overflow(total, d, &total) && total <= kMaxBytes;
  }
  if (fits) return total;
  const bool negative = std::any_of(dims.begin(), dims.end(), [](int64_t d) { return d < 0; });
  if (!negative && std::find(dims.begin(), dims.end(), 0) != dims.end()) return 0;
  std::string shape;
  for (int64_t d : dims) shape += (shape.empty() ? "" : ",") + std::to_string(d);
  throw Error(RM_RESOURCE_EXHAUSTED, "[size] expected a tensor of at most 2^47 bytes, got [" +
                                         shape + "] of " + std::to_string(item) + " " +
                                         std::string(unit) + " each");
}

}  // namespace

int64_t num_elements(std::span<const int64_t> dims) { return checked(dims, 1, "element"); }

int64_t num_bytes(std::span<const int64_t> dims, DType dtype) {
  return checked(dims, static_cast<int64_t>(size_bytes(dtype)), "bytes");
}

}  // namespace rm::ir
