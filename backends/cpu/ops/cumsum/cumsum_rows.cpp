// Rows of cumsum: one running sum a line, in f64 or i64, rounded at every store.
#include "ops/cumsum/rows.hpp"

#include "common/lines.hpp"
#include "common/parallel.hpp"
#include "common/plain_vec.hpp"
#include "common/row.hpp"

namespace rm::cpu {
namespace {

struct Line {
  const void* x;
  void* y;
  int64_t n, x_stride, y_stride;
};

template <class T, class Y>
void run_line(const Line& l) {
  const auto* x = static_cast<const T*>(l.x);
  auto* y = static_cast<Y*>(l.y);
  // Unsigned: integer sums wrap.
  using Acc = std::conditional_t<kIsFloat<T>, double, uint64_t>;
  Acc acc = 0;
  for (int64_t i = 0; i < l.n; ++i) {
    acc += static_cast<Acc>(get(x[i * l.x_stride]));
    put(static_cast<Wide<T>>(acc), y + i * l.y_stride);
  }
}

class Cumsum {
 public:
  static constexpr const char* kOp = "cumsum";
  static constexpr const char* kAlgorithm = "lines";

  static const char* reject(const Problem&) { return nullptr; }
  static double cost_ns(const Problem& p) {
    return 100 + 1.5 * static_cast<double>(p.input(0).numel());
  }

  Cumsum(const Problem& p, Isa) {
    View x = p.input(0), y = p.output(0);
    at_least_one_axis(x);
    at_least_one_axis(y);
    const int axis = normal_axis(p.attr_int("axis", -1), x.rank());
    line_ = {nullptr, nullptr, x.dim(axis), x.step(axis), y.step(axis)};
    lines_ = lines_along(axis, x.shape, {x.stride, y.stride});
    x_bytes_ = dtype_bytes(x.dtype);
    y_bytes_ = dtype_bytes(y.dtype);
    run_ = visit(x.dtype, [&](auto from) {
      return visit(y.dtype, [&](auto to) -> void (*)(const Line&) {
        return run_line<decltype(from), decltype(to)>;
      });
    });
    threads_ = thread_limit();
  }
  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    const double work = 1.2 * static_cast<double>(line_.n * lines_.count());
    parallel_ranges(lines_.count(), threads_for(work, lines_.count(), threads_), 1,
                    [&](int64_t begin, int64_t end, int) {
                      Line line = line_;
                      for (int64_t i = begin; i < end; ++i) {
                        line.x = at(l.inputs[0], lines_.offset(0, i), x_bytes_);
                        line.y = at(l.outputs[0], lines_.offset(1, i), y_bytes_);
                        run_(line);
                      }
                    });
    return nullptr;
  }

 private:
  Line line_;
  RowsIndex lines_;
  void (*run_)(const Line&);
  int64_t x_bytes_, y_bytes_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> cumsum_rows() { return plain_rows<Cumsum>(); }

}  // namespace rm::cpu
