// Rows of scan: one running value a line, in f64 or i64, rounded at every store.
#include "ops/scan/rows.hpp"

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

struct Product {
  static double next(double a, double b) { return a * b; }
  static int64_t next(int64_t a, int64_t b) {  // wraps
    return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};

// A NaN stays: it is neither smaller nor larger than what follows.
struct Maximum {
  static double next(double a, double b) { return b > a || std::isnan(b) ? b : a; }
  static int64_t next(int64_t a, int64_t b) { return b > a ? b : a; }
};

struct Minimum {
  static double next(double a, double b) { return b < a || std::isnan(b) ? b : a; }
  static int64_t next(int64_t a, int64_t b) { return b < a ? b : a; }
};

struct LogSumExp {
  static double next(double a, double b) {
    if (std::isnan(a) || std::isnan(b)) return std::nan("");
    const double most = b > a ? b : a;
    return std::isinf(most) ? most : most + std::log1p(std::exp(-std::fabs(a - b)));
  }
  static int64_t next(int64_t a, int64_t) { return a; }  // of integers there is none: rejected
};

template <class How, class T, class Y>
void run_line(const Line& l) {
  const auto* x = static_cast<const T*>(l.x);
  auto* y = static_cast<Y*>(l.y);
  if (l.n == 0) return;
  Wide<T> value = get(x[0]);
  put(value, y);
  for (int64_t i = 1; i < l.n; ++i) {
    const Wide<T> next = get(x[i * l.x_stride]);
    // A NaN at the front is not replaced by a comparison that is false.
    value = value != value ? value : How::next(value, next);
    put(value, y + i * l.y_stride);
  }
}

using Run = void (*)(const Line&);

/// The result has x's type, or is i64 (a product of integers).
template <class How>
Run run_of(DType from, DType to) {
  return visit(from, [&](auto x) -> Run {
    using T = decltype(x);
    if constexpr (!kIsFloat<T>) {
      if (to == DType::i64) return run_line<How, T, int64_t>;
    }
    return run_line<How, T, T>;
  });
}

class Scan {
 public:
  static constexpr const char* kOp = "scan";
  static constexpr const char* kAlgorithm = "lines";

  static const char* reject(const Problem& p) {
    const std::string_view kind = p.attr_string("kind", "");
    const DType t = p.input(0).dtype;
    const bool floats =
        t == DType::f32 || t == DType::f64 || t == DType::bf16 || t == DType::f16;
    if (kind == "logsumexp") return floats ? nullptr : "logarithms of integers";
    if (kind != "prod" && kind != "max" && kind != "min") return "the kind is not known";
    const DType y = p.output(0).dtype;
    return y == t || (!floats && y == DType::i64) ? nullptr : "the result has another type";
  }
  static double cost_ns(const Problem& p) {
    const bool logarithms = p.attr_string("kind", "") == "logsumexp";
    return 100 + (logarithms ? 30 : 2) * static_cast<double>(p.input(0).numel());
  }

  Scan(const Problem& p, Isa) {
    View x = p.input(0), y = p.output(0);
    at_least_one_axis(x);
    at_least_one_axis(y);
    const int axis = normal_axis(p.attr_int("axis", -1), x.rank());
    line_ = {nullptr, nullptr, x.dim(axis), x.step(axis), y.step(axis)};
    lines_ = lines_along(axis, x.shape, {x.stride, y.stride});
    x_bytes_ = dtype_bytes(x.dtype);
    y_bytes_ = dtype_bytes(y.dtype);
    const std::string_view kind = p.attr_string("kind", "");
    run_ = kind == "prod"  ? run_of<Product>(x.dtype, y.dtype)
           : kind == "max" ? run_of<Maximum>(x.dtype, y.dtype)
           : kind == "min" ? run_of<Minimum>(x.dtype, y.dtype)
                           : run_of<LogSumExp>(x.dtype, y.dtype);
    step_ns_ = kind == "logsumexp" ? 30 : 1.5;
    threads_ = thread_limit();
  }
  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    const double work = step_ns_ * static_cast<double>(line_.n * lines_.count());
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
  double step_ns_;
  int64_t x_bytes_, y_bytes_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> scan_rows() { return plain_rows<Scan>(); }

}  // namespace rm::cpu
