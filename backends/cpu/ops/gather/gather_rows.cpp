// Rows of gather: y[i][j] = x[index[i][j]][j] along an axis; every index is checked before it is
// used.
#include "ops/gather/rows.hpp"

#include <cstring>

#include "common/lines.hpp"
#include "common/parallel.hpp"
#include "common/plain_vec.hpp"
#include "common/row.hpp"

namespace rm::cpu {
namespace {

class Gather {
 public:
  static constexpr const char* kOp = "gather";
  static constexpr const char* kAlgorithm = "elements";

  static const char* reject(const Problem& p) {
    const DType t = p.input(1).dtype;
    return t == DType::i64 || t == DType::i32 ? nullptr : "the index is neither i32 nor i64";
  }
  static double cost_ns(const Problem& p) {
    return 100 + 2.0 * static_cast<double>(p.output(0).numel());
  }

  Gather(const Problem& p, Isa) {
    View x = p.input(0), index = p.input(1), y = p.output(0);
    at_least_one_axis(x);
    at_least_one_axis(index);
    at_least_one_axis(y);
    const int axis = normal_axis(p.attr_int("axis", 0), x.rank());
    limit_ = x.dim(axis);
    step_ = x.step(axis);
    wide_ = index.dtype == DType::i64;
    bytes_ = dtype_bytes(x.dtype);
    x.stride[static_cast<size_t>(axis)] = 0;  // the index takes that axis' place
    n_ = y.dim(-1);
    strides_[0] = y.step(-1);
    strides_[1] = index.step(-1);
    strides_[2] = x.step(-1);
    rows_ = RowsIndex(y.shape, {y.stride, index.stride, x.stride});
    threads_ = thread_limit();
  }
  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    const double work = 1.5 * static_cast<double>(n_ * rows_.count());
    bool failed = false;
    parallel_ranges(rows_.count(), threads_for(work, rows_.count(), threads_), 1,
                    [&](int64_t begin, int64_t end, int) {
                      for (int64_t i = begin; i < end; ++i) {
                        if (!row(l, i)) {
#pragma omp atomic write
                          failed = true;
                        }
                      }
                    });
    if (!failed) return nullptr;
    return plugin::fail(RM_OUT_OF_RANGE, "[gather] expected indices in [0, " +
                                             std::to_string(limit_) + "), got one outside");
  }

 private:
  bool row(const rm_launch& l, int64_t r) const {
    bool good = true;
    visit_bytes(bytes_, [&](auto zero) {
      using T = decltype(zero);
      auto* y = static_cast<T*>(l.outputs[0]) + rows_.offset(0, r);
      const auto* x = static_cast<const T*>(l.inputs[0]) + rows_.offset(2, r);
      const int64_t from = rows_.offset(1, r);
      good = wide_ ? pick(y, x, static_cast<const int64_t*>(l.inputs[1]) + from)
                   : pick(y, x, static_cast<const int32_t*>(l.inputs[1]) + from);
    });
    return good;
  }

  template <class T, class I>
  bool pick(T* y, const T* x, const I* index) const {
    if (strides_[0] != 1 || strides_[1] != 1) {
      return pick(y, x, index, strides_[0], strides_[1], step_, strides_[2]);
    }
    using One = std::integral_constant<int64_t, 1>;
    using None = std::integral_constant<int64_t, 0>;
    if (step_ == 1 && strides_[2] == 0) return pick(y, x, index, One{}, One{}, One{}, None{});
    return pick(y, x, index, One{}, One{}, step_, strides_[2]);
  }

  /// Strides are numbers or constants of the type: loops over dense rows compute no addresses.
  template <class T, class I, class Sy, class Si, class Step, class Sx>
  bool pick(T* y, const T* x, const I* index, Sy sy, Si si, Step step, Sx sx) const {
    const int64_t n = n_;
    const auto limit = static_cast<uint64_t>(limit_);
    bool good = true;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = index[i * si];
      if (static_cast<uint64_t>(at) >= limit) {  // negative ones are larger still
        good = false;
        continue;
      }
      y[i * sy] = x[at * step + i * sx];
    }
    return good;
  }

  RowsIndex rows_;
  int64_t limit_, step_, bytes_, n_, strides_[3];
  bool wide_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> gather_rows() { return plain_rows<Gather>(); }

}  // namespace rm::cpu
