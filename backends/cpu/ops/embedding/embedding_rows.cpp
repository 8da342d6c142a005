// Rows of embedding: copies table rows; every id is checked before its row is read.
#include "ops/embedding/rows.hpp"

#include <cstring>

#include "common/parallel.hpp"
#include "common/row.hpp"
#include "common/rows_index.hpp"

namespace rm::cpu {
namespace {

class Embedding {
 public:
  static constexpr const char* kOp = "embedding";
  static constexpr const char* kAlgorithm = "rows";

  static const char* reject(const Problem& p) {
    const DType ids = p.input(1).dtype;
    return ids == DType::i64 || ids == DType::i32 ? nullptr : "ids are neither i32 nor i64";
  }
  static double cost_ns(const Problem& p) {
    return 200 + 0.2 * static_cast<double>(p.output(0).numel());
  }

  Embedding(const Problem& p, Isa) {
    const View table = p.input(0), ids = p.input(1), y = p.output(0);
    bytes_ = dtype_bytes(table.dtype);
    rows_ = table.dim(0);
    n_ = table.dim(1);
    table_row_ = table.step(0);
    table_column_ = table.step(1);
    y_column_ = y.step(-1);
    wide_ids_ = ids.dtype == DType::i64;
    // ids get a last axis of their own so that they are indexed like rows of y.
    auto id_stride = ids.stride;
    id_stride.push_back(0);
    index_ = RowsIndex(y.shape, {y.stride, id_stride});
    threads_ = thread_limit();
  }

  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    int64_t bad = -1;
    const double work =
        0.2 * static_cast<double>(n_ * bytes_ / 4 + 8) * static_cast<double>(index_.count());
    const int threads = threads_for(work, index_.count(), threads_);
    parallel_ranges(index_.count(), threads, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        if (!copy_row(l, i)) {
#pragma omp atomic write
          bad = i;
        }
      }
    });
    if (bad < 0) return nullptr;
    return plugin::fail(RM_OUT_OF_RANGE, "[embedding] expected ids in [0, " +
                                             std::to_string(rows_) + "), got " +
                                             std::to_string(id(l, bad)));
  }

 private:
  int64_t id(const rm_launch& l, int64_t i) const {
    const int64_t offset = index_.offset(1, i);
    return wide_ids_ ? static_cast<const int64_t*>(l.inputs[1])[offset]
                     : static_cast<const int32_t*>(l.inputs[1])[offset];
  }

  bool copy_row(const rm_launch& l, int64_t i) const {
    const int64_t row = id(l, i);
    if (row < 0 || row >= rows_) return false;
    const char* src = at(l.inputs[0], row * table_row_, bytes_);
    char* dst = at(l.outputs[0], index_.offset(0, i), bytes_);
    if (table_column_ == 1 && y_column_ == 1) {
      std::memcpy(dst, src, static_cast<size_t>(n_ * bytes_));
      return true;
    }
    for (int64_t c = 0; c < n_; ++c) {
      std::memcpy(dst + c * y_column_ * bytes_, src + c * table_column_ * bytes_,
                  static_cast<size_t>(bytes_));
    }
    return true;
  }

  RowsIndex index_;
  int64_t bytes_, rows_, n_, table_row_, table_column_, y_column_;
  bool wide_ids_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> embedding_rows() { return plain_rows<Embedding>(); }

}  // namespace rm::cpu
