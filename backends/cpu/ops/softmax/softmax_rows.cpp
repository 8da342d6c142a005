// Rows of softmax over the last axis; `log` picks log_softmax.
#include "ops/softmax/rows.hpp"

#include "common/norm_row.hpp"
#include "common/parallel.hpp"
#include "common/row.hpp"
#include "common/rows_index.hpp"

namespace rm::cpu {
RM_CPU_TABLE(NormTable, softmax_table)
RM_CPU_TABLE(NormTable, log_softmax_table)
namespace {

class Softmax {
 public:
  static constexpr const char* kOp = "softmax";
  static constexpr const char* kAlgorithm = "rows";

  static const char* reject(const Problem& p) {
    return is_float(p.input(0).dtype) ? nullptr : "x is not of a float type";
  }
  static double cost_ns(const Problem& p) {
    return 300 + 0.8 * static_cast<double>(p.input(0).numel());
  }

  Softmax(const Problem& p, Isa isa) {
    View x = p.input(0), y = p.output(0);
    if (y.dtype != x.dtype) throw std::invalid_argument("[softmax] expected a result of x's type");
    if (x.rank() == 0) x.shape = x.stride = y.shape = y.stride = {1};
    const NormTable* table = p.attr_int("log", 0) ? RM_CPU_PICK(isa, log_softmax_table)
                                                  : RM_CPU_PICK(isa, softmax_table);
    row_ = table->find(x.dtype);
    bytes_ = dtype_bytes(x.dtype);
    n_ = x.dim(-1);
    x_stride_ = x.step(-1);
    y_stride_ = y.step(-1);
    index_ = RowsIndex(x.shape, {x.stride, y.stride});
    threads_ = thread_limit();
  }

  uint64_t workspace_bytes() const { return row_bytes() * static_cast<uint64_t>(threads_); }

  rm_status* launch(const rm_launch& l) const {
    if (n_ == 0) return nullptr;
    const double work = 0.7 * static_cast<double>(n_ * index_.count());
    const int threads = threads_for(work, index_.count(), threads_);
    parallel_ranges(index_.count(), threads, 1, [&](int64_t begin, int64_t end, int thread) {
      NormRow r{};
      r.scratch = static_cast<char*>(l.workspace) + row_bytes() * static_cast<uint64_t>(thread);
      r.n = n_;
      r.x_stride = x_stride_;
      r.y_stride = y_stride_;
      for (int64_t i = begin; i < end; ++i) {
        r.x = at(l.inputs[0], index_.offset(0, i), bytes_);
        r.y = at(l.outputs[0], index_.offset(1, i), bytes_);
        row_(r);
      }
    });
    return nullptr;
  }

 private:
  uint64_t row_bytes() const { return (static_cast<uint64_t>(n_) * 8 + 63) & ~63ull; }

  NormFn row_;
  RowsIndex index_;
  int64_t bytes_, n_, x_stride_, y_stride_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> softmax_rows() { return isa_rows<Softmax>(); }

}  // namespace rm::cpu
