// A kernel that walks along one axis with a running value: cumsum and scan.
#pragma once

#include "common/lines.hpp"
#include "common/parallel.hpp"
#include "common/row.hpp"

namespace rm::cpu {

/// Lines of x and y along the attribute `axis`, each written by one function, on several threads.
class RunningLines {
 public:
  struct Line {
    const void* x;
    void* y;
    int64_t n, x_stride, y_stride;  // in elements
  };
  using Run = void (*)(const Line&);

  /// `element_ns`: what one element costs; it decides how many threads are worth starting.
  RunningLines(const Problem& p, Run run, double element_ns) : run_(run), element_ns_(element_ns) {
    View x = p.input(0), y = p.output(0);
    at_least_one_axis(x);
    at_least_one_axis(y);
    const int axis = normal_axis(p.attr_int("axis", -1), x.rank());
    line_ = {nullptr, nullptr, x.dim(axis), x.step(axis), y.step(axis)};
    lines_ = lines_along(axis, x.shape, {x.stride, y.stride});
    x_bytes_ = dtype_bytes(x.dtype);
    y_bytes_ = dtype_bytes(y.dtype);
    threads_ = thread_limit();
  }
  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    const double work = element_ns_ * static_cast<double>(line_.n * lines_.count());
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
  Run run_;
  double element_ns_;
  int64_t x_bytes_, y_bytes_;
  int threads_;
};

}  // namespace rm::cpu
