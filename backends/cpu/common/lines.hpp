// Lines along one axis: where each begins in several operands, for cumsum and sort.
#pragma once

#include "common/rows_index.hpp"

namespace rm::cpu {

/// `shape` without `axis`, and the strides that go with it.
inline RowsIndex lines_along(int axis, const std::vector<int64_t>& shape,
                             const std::vector<std::vector<int64_t>>& strides) {
  const auto cut = [&](std::vector<int64_t> v) {
    v.erase(v.begin() + axis);
    return v;
  };
  std::vector<std::vector<int64_t>> rest;
  for (const auto& s : strides) rest.push_back(cut(s));
  return RowsIndex(cut(shape), rest, 0);
}

/// A rank-0 operand as a line of one element.
inline void at_least_one_axis(View& v) {
  if (v.rank() == 0) v.shape = v.stride = {1};
}

/// An i32 or i64 index at element `offset`.
inline int64_t read_index(const void* base, int64_t offset, bool wide) {
  return wide ? static_cast<const int64_t*>(base)[offset]
              : static_cast<const int32_t*>(base)[offset];
}

}  // namespace rm::cpu
