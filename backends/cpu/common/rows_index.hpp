// Where the rows of several operands of shape [*, N] begin, for a loop over the leading axes.
#pragma once

#include <vector>

#include "common/problem.hpp"

namespace rm::cpu {

class RowsIndex {
 public:
  RowsIndex() = default;
  /// `kept` trailing axes stay inside a row.
  RowsIndex(const std::vector<int64_t>& shape, const std::vector<std::vector<int64_t>>& strides,
            int kept = 1) {
    const auto cut = [&](const std::vector<int64_t>& v) {
      return std::vector<int64_t>(v.begin(), v.end() - kept);
    };
    std::vector<std::vector<int64_t>> outer;
    for (const auto& s : strides) outer.push_back(cut(s));
    nest_ = make_nest(cut(shape), outer, -1);
    count_ = nest_.numel();
  }

  int64_t count() const { return count_; }

  /// In elements.
  int64_t offset(size_t operand, int64_t row) const {
    const auto& stride = nest_.strides[operand];
    int64_t sum = 0;
    for (int i = nest_.rank() - 1; i > 0; --i) {
      sum += row % nest_.shape[i] * stride[i];
      row /= nest_.shape[i];
    }
    return sum + row * stride[0];
  }

 private:
  Nest nest_;
  int64_t count_ = 0;
};

inline const char* at(const void* base, int64_t elements, int64_t bytes) {
  return base ? static_cast<const char*>(base) + elements * bytes : nullptr;
}
inline char* at(void* base, int64_t elements, int64_t bytes) {
  return base ? static_cast<char*>(base) + elements * bytes : nullptr;
}

}  // namespace rm::cpu
