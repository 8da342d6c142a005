// Rows of rope: y = x * cos + rotate(x) * sin, row by row over the leading axes.
#include "ops/rope/rows.hpp"

#include "common/parallel.hpp"
#include "common/row.hpp"
#include "common/rows_index.hpp"
#include "ops/rope/kernels.hpp"

namespace rm::cpu {
RM_CPU_TABLE(RopeTable, rope_table)
namespace {

class Rope {
 public:
  static constexpr const char* kOp = "rope";
  static constexpr const char* kAlgorithm = "rows";

  static const char* reject(const Problem& p) {
    const View x = p.input(0), cos = p.input(1);
    if (x.rank() < 1 || x.dim(-1) % 2) return "the last axis is odd";
    return baseline::rope_table.find(x.dtype, cos.dtype, false) ? nullptr
                                                                : "x or cos is not of a float type";
  }
  static double cost_ns(const Problem& p) {
    return 200 + 0.4 * static_cast<double>(p.output(0).numel());
  }

  Rope(const Problem& p, Isa isa) {
    const View x = p.input(0), cos = p.input(1), sin = p.input(2), y = p.output(0);
    if (sin.dtype != cos.dtype || y.dtype != x.dtype || cos.shape != x.shape ||
        sin.shape != x.shape) {
      throw std::invalid_argument("[rope] expected cos and sin of x's shape and of one type");
    }
    row_ =
        RM_CPU_PICK(isa, rope_table)->find(x.dtype, cos.dtype, p.attr_int("interleaved", 0) != 0);
    bytes_ = dtype_bytes(x.dtype);
    trig_bytes_ = dtype_bytes(cos.dtype);
    shape_ = {nullptr,    nullptr,      nullptr,      nullptr,   x.dim(-1),
              x.step(-1), cos.step(-1), sin.step(-1), y.step(-1)};
    index_ = RowsIndex(x.shape, {x.stride, cos.stride, sin.stride, y.stride});
    threads_ = thread_limit();
  }

  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    const double work = 0.3 * static_cast<double>((shape_.n + 16) * index_.count());
    const int threads = threads_for(work, index_.count(), threads_);
    parallel_ranges(index_.count(), threads, 1, [&](int64_t begin, int64_t end, int) {
      RopeRow r = shape_;
      for (int64_t i = begin; i < end; ++i) {
        r.x = at(l.inputs[0], index_.offset(0, i), bytes_);
        r.cos = at(l.inputs[1], index_.offset(1, i), trig_bytes_);
        r.sin = at(l.inputs[2], index_.offset(2, i), trig_bytes_);
        r.y = at(l.outputs[0], index_.offset(3, i), bytes_);
        row_(r);
      }
    });
    return nullptr;
  }

 private:
  RopeFn row_;
  RopeRow shape_;
  RowsIndex index_;
  int64_t bytes_, trig_bytes_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> rope_rows() { return isa_rows<Rope>(); }

}  // namespace rm::cpu
