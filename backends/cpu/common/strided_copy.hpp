// Copies a strided view onto another of the same shape and type: runs of memcpy where both sides
// are dense, tiles where one side is transposed, single elements otherwise.
#pragma once

#include "common/rows_index.hpp"

namespace rm::cpu {

class StridedCopy {
 public:
  StridedCopy() = default;
  StridedCopy(const View& x, const View& y);

  /// On as many threads as the work pays for; `serial` keeps it on the calling one.
  void run(void* y, const void* x, bool serial = false) const;
  int64_t total() const { return total_; }

 private:
  enum class Kind { dense, tiles, elements };

  void take_inner(Nest& nest);
  void piece(char* dst, const char* src, int64_t begin, int64_t end) const;

  RowsIndex outer_;
  Kind kind_ = Kind::dense;
  int64_t bytes_ = 1, total_ = 0, n_ = 1, m_ = 1, ds_ = 1, ss_ = 1;
  int threads_ = 1;
};

}  // namespace rm::cpu
