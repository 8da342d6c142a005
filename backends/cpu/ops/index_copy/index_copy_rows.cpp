// Rows of index_copy: src written into y at index along an axis; the rest of y stays as it is.  All
// indices are checked before anything is written.  With equal indices the last one wins.
#include "ops/index_copy/rows.hpp"

#include <cstring>

#include "common/lines.hpp"
#include "common/parallel.hpp"
#include "common/plain_vec.hpp"
#include "common/row.hpp"

namespace rm::cpu {
namespace {

class IndexCopy {
 public:
  static constexpr const char* kOp = "index_copy";
  static constexpr const char* kAlgorithm = "rows";

  static const char* reject(const Problem& p) {
    const DType t = p.input(0).dtype;
    if (t != DType::i64 && t != DType::i32) return "the index is neither i32 nor i64";
    return p.input(1).dtype == p.output(0).dtype ? nullptr : "src and y have different types";
  }
  static double cost_ns(const Problem& p) {
    return 200 + 0.5 * static_cast<double>(p.input(1).numel());
  }

  IndexCopy(const Problem& p, Isa) {
    View index = p.input(0), src = p.input(1), y = p.output(0);
    const int axis = normal_axis(p.attr_int("axis", 0), y.rank());
    if (index.rank() != 1 || src.rank() != y.rank() || src.dim(axis) != index.dim(0)) {
      throw std::invalid_argument("[index_copy] expected a flat index, one entry a slice of src");
    }
    count_ = index.dim(0);
    index_step_ = index.step(0);
    wide_ = index.dtype == DType::i64;
    limit_ = y.dim(axis);
    step_ = y.step(axis);
    src_step_ = src.step(axis);
    item_ = static_cast<int64_t>(dtype_bytes(y.dtype));
    inner_ = axis == y.rank() - 1 ? 1 : src.dim(-1);
    y_inner_ = inner_ == 1 ? 1 : y.step(-1);
    src_inner_ = inner_ == 1 ? 1 : src.step(-1);
    // What is left: every axis but `axis` and, unless it is that one, the last.
    lines_ = lines_along(axis, src.shape, {y.stride, src.stride});
    if (axis != y.rank() - 1) {
      std::vector<int64_t> shape = src.shape, ys = y.stride, ss = src.stride;
      for (auto* v : {&shape, &ys, &ss}) {
        v->erase(v->begin() + axis);
        v->pop_back();
      }
      lines_ = RowsIndex(shape, {ys, ss}, 0);
    }
  }
  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    for (int64_t i = 0; i < count_; ++i) {
      const int64_t where = read_index(l.inputs[0], i * index_step_, wide_);
      if (where < 0 || where >= limit_) {
        return plugin::fail(RM_OUT_OF_RANGE, "[index_copy] expected indices in [0, " +
                                                 std::to_string(limit_) + "), got " +
                                                 std::to_string(where));
      }
    }
    const double bytes = static_cast<double>(lines_.count() * count_ * inner_ * item_);
    const int threads = threads_for(bytes * 0.2, lines_.count(), thread_limit());
    parallel_ranges(lines_.count(), threads, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t line = begin; line < end; ++line) copy_line(l, line);
    });
    return nullptr;
  }

 private:
  void copy_line(const rm_launch& l, int64_t line) const {
    char* y = at(l.outputs[0], lines_.offset(0, line), item_);
    const char* src = at(l.inputs[1], lines_.offset(1, line), item_);
    const bool dense = y_inner_ == 1 && src_inner_ == 1;
    for (int64_t i = 0; i < count_; ++i) {
      char* to = y + read_index(l.inputs[0], i * index_step_, wide_) * step_ * item_;
      const char* from = src + i * src_step_ * item_;
      if (dense) {
        std::memcpy(to, from, static_cast<size_t>(inner_ * item_));
        continue;
      }
      for (int64_t k = 0; k < inner_; ++k) {
        std::memcpy(to + k * y_inner_ * item_, from + k * src_inner_ * item_,
                    static_cast<size_t>(item_));
      }
    }
  }

  RowsIndex lines_;
  int64_t count_ = 0, index_step_ = 1, limit_ = 0, step_ = 0, src_step_ = 0;
  int64_t item_ = 0, inner_ = 1, y_inner_ = 1, src_inner_ = 1;
  bool wide_ = true;
};

}  // namespace

std::span<const rm_kernel> index_copy_rows() { return plain_rows<IndexCopy>(); }

}  // namespace rm::cpu
