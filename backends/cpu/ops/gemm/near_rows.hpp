// Rows of x as AmxNear reads them: where they lie, or put in order in memory of a launch.
#pragma once

#include "ops/gemm/amx_kernels.hpp"

namespace rm::cpu::gemm {

class NearRows {
 public:
  static constexpr int64_t kPair = 2 * kAmxRows;

  NearRows() = default;
  /// Element (row, k) of x, in bf16, lies at row * row_stride + k * col_stride.
  NearRows(int64_t m, int64_t k, int64_t row_stride, int64_t col_stride);

  /// Rows are read where they lie, but for the last, incomplete pair of groups.
  bool in_place() const { return in_place_; }
  /// Rows that are put in order, and the memory they take.
  int64_t ordered() const;
  int64_t bytes() const;
  /// Of the rows that are put in order [begin, end), with zeros behind the last k. Sums of rows behind the
  /// last one are made of whatever lies there, and not stored.
  void order(const char* x, int64_t begin, int64_t end, char* to) const;
  /// The pair of groups from `row` on, from block b of k on.
  void find(const char* x, const char* ordered, int64_t row, int64_t b, AmxNear* args) const;

 private:
  int64_t pitch() const;

  int64_t m_ = 0, k_ = 0, row_stride_ = 0, col_stride_ = 1;
  bool in_place_ = false;
};

}  // namespace rm::cpu::gemm
