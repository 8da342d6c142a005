// Rows of index: x[:, i0, i1, ..., :] with index operands on consecutive axes.  Every position is
// checked before it is read; what lies behind the indexed axes is copied as a block.
#include "ops/index/rows.hpp"

#include "common/lines.hpp"
#include "common/parallel.hpp"
#include "common/row.hpp"
#include "common/strided_copy.hpp"

namespace rm::cpu {
namespace {

View part(const View& v, size_t from, size_t to) {
  View out;
  out.dtype = v.dtype;
  out.shape.assign(v.shape.begin() + static_cast<long>(from),
                   v.shape.begin() + static_cast<long>(to));
  out.stride.assign(v.stride.begin() + static_cast<long>(from),
                    v.stride.begin() + static_cast<long>(to));
  return out;
}

class Index {
 public:
  static constexpr const char* kOp = "index";
  static constexpr const char* kAlgorithm = "blocks";

  static const char* reject(const Problem& p) {
    for (size_t i = 1; i < p.num_inputs(); ++i) {
      const DType t = p.input(i).dtype;
      if (t != DType::i64 && t != DType::i32) return "an index is neither i32 nor i64";
    }
    return nullptr;
  }
  static double cost_ns(const Problem& p) {
    return 100 + 2.0 * static_cast<double>(p.output(0).numel());
  }

  Index(const Problem& p, Isa) {
    const View x = p.input(0), y = p.output(0);
    const size_t count = p.num_inputs() - 1;
    const auto axes = p.attr_ints("axes");
    if (axes.size() != count || count == 0) {
      throw std::invalid_argument("[index] expected one axis an index operand");
    }
    const auto first = static_cast<size_t>(normal_axis(axes[0], x.rank()));
    std::vector<std::vector<int64_t>> strides;
    std::vector<int64_t> shape;
    for (size_t i = 0; i < count; ++i) {
      const auto axis = static_cast<size_t>(normal_axis(axes[i], x.rank()));
      if (axis != first + i) throw std::invalid_argument("[index] expected consecutive axes");
      const View index = p.input(i + 1);
      shape = index.shape;
      strides.push_back(index.stride);
      indices_.push_back({x.shape[axis], x.stride[axis], index.dtype == DType::i64});
    }
    bytes_ = dtype_bytes(x.dtype);
    const size_t behind = first + count, in_y = first + shape.size();
    strides.push_back(part(y, first, in_y).stride);
    positions_ = RowsIndex(shape, strides, 0);
    const View x_front = part(x, 0, first), y_front = part(y, 0, first);
    front_ = RowsIndex(x_front.shape, {y_front.stride, x_front.stride}, 0);
    block_ = StridedCopy(part(x, behind, x.shape.size()), part(y, in_y, y.shape.size()));
    threads_ = thread_limit();
  }
  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    const double work = static_cast<double>(positions_.count() * front_.count()) *
                        (10.0 + 0.3 * static_cast<double>(block_.total()));
    int64_t bad = -1;
    parallel_ranges(positions_.count(), threads_for(work, positions_.count(), threads_), 1,
                    [&](int64_t begin, int64_t end, int) {
                      for (int64_t i = begin; i < end; ++i) {
                        const int wrong = position(l, i);
                        if (wrong >= 0) {
#pragma omp atomic write
                          bad = wrong;
                        }
                      }
                    });
    if (bad < 0) return nullptr;
    const std::string size = std::to_string(indices_[static_cast<size_t>(bad)].limit);
    return plugin::fail(RM_OUT_OF_RANGE, "[index] expected indices in [-" + size + ", " + size +
                                             ") of operand " + std::to_string(bad + 1) +
                                             ", got one outside");
  }

 private:
  struct Axis {
    int64_t limit, stride;
    bool wide;
  };

  /// The number of the index operand that is out of range, or -1.
  int position(const rm_launch& l, int64_t i) const {
    int64_t offset = 0;
    for (size_t a = 0; a < indices_.size(); ++a) {
      int64_t where = read_index(l.inputs[a + 1], positions_.offset(a, i), indices_[a].wide);
      if (where < 0) where += indices_[a].limit;
      if (where < 0 || where >= indices_[a].limit) return static_cast<int>(a);
      offset += where * indices_[a].stride;
    }
    const int64_t y = positions_.offset(indices_.size(), i);
    for (int64_t f = 0; f < front_.count(); ++f) {
      block_.run(at(l.outputs[0], y + front_.offset(0, f), bytes_),
                 at(l.inputs[0], offset + front_.offset(1, f), bytes_), true);
    }
    return -1;
  }

  std::vector<Axis> indices_;
  RowsIndex positions_, front_;
  StridedCopy block_;
  int64_t bytes_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> index_rows() { return plain_rows<Index>(); }

}  // namespace rm::cpu
