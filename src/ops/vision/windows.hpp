// The geometry that convolutions and pools share: windows that slide over the spatial axes.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/infer.hpp"

namespace rm::ops {

/// Attributes of a node over `axes` spatial axes; absent ones take their defaults (stride 1, no
/// padding, dilation 1).
struct Windows {
  std::vector<int64_t> stride, begin, end, dilation;  // `begin`, `end`: padding; may be negative
  size_t axes() const { return stride.size(); }
};

/// Reads and checks `stride`, `padding` (all begins, then all ends) and `dilation`.
Windows windows_of(const ir::Node& node, size_t axes);
/// floor((size + padding - dilation (kernel - 1) - 1) / stride) + 1 along one axis.
ir::Dim window_count(const ir::Node& node, const Windows& w, size_t axis, const ir::Dim& size,
                     int64_t kernel);
/// Where window `at` has its element `k`, in [0, size), or -1 in the padding.
inline int64_t window_element(const Windows& w, size_t axis, int64_t at, int64_t k, int64_t size) {
  const int64_t i = at * w.stride[axis] - w.begin[axis] + k * w.dilation[axis];
  return i >= 0 && i < size ? i : -1;
}

}  // namespace rm::ops
