// Window attributes, checked once for every operator that slides.
#include "ops/vision/windows.hpp"

#include <algorithm>

namespace rm::ops {
namespace {

std::vector<int64_t> ints_or(const ir::Node& node, const char* name, size_t count,
                             int64_t otherwise, int64_t least) {
  if (!node.has(name)) return std::vector<int64_t>(count, otherwise);
  const std::vector<int64_t>& given = node.ints(name);
  const bool small = std::any_of(given.begin(), given.end(), [&](int64_t v) { return v < least; });
  if (given.size() != count || small) {
    fail(node, std::to_string(count) + " values of at least " + std::to_string(least) + " as " + name,
         std::to_string(given.size()) + " values");
  }
  return given;
}

}  // namespace

Windows windows_of(const ir::Node& node, size_t axes) {
  const std::vector<int64_t> padding = ints_or(node, "padding", 2 * axes, 0, -(int64_t{1} << 30));
  const auto half = padding.begin() + static_cast<std::ptrdiff_t>(axes);
  return {ints_or(node, "stride", axes, 1, 1),
          {padding.begin(), half},
          {half, padding.end()},
          ints_or(node, "dilation", axes, 1, 1)};
}

ir::Dim window_count(const ir::Node& node, const Windows& w, size_t axis, const ir::Dim& size,
                     int64_t kernel) {
  const ir::Dim room =
      size + ir::Dim(w.begin[axis] + w.end[axis] - w.dilation[axis] * (kernel - 1) - 1);
  if (room.is_static() && room.value() < 0) {
    fail(node, "windows that fit into the padded input", size.str());
  }
  return ir::Dim::floordiv(room, ir::Dim(w.stride[axis])) + ir::Dim(1);
}

}  // namespace rm::ops
