// Rows of scan: one running value a line, in f64 or i64, rounded at every store.
#include "ops/scan/rows.hpp"

#include <cmath>

#include "common/plain_vec.hpp"
#include "common/running_lines.hpp"

namespace rm::cpu {
namespace {

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
void run_line(const RunningLines::Line& l) {
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

using Run = RunningLines::Run;

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

class Scan : public RunningLines {
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

  Scan(const Problem& p, Isa)
      : RunningLines(p, run_of_kind(p), p.attr_string("kind", "") == "logsumexp" ? 30 : 1.5) {}

 private:
  static Run run_of_kind(const Problem& p) {
    const std::string_view kind = p.attr_string("kind", "");
    const DType from = p.input(0).dtype, to = p.output(0).dtype;
    if (kind == "prod") return run_of<Product>(from, to);
    if (kind == "max") return run_of<Maximum>(from, to);
    if (kind == "min") return run_of<Minimum>(from, to);
    return run_of<LogSumExp>(from, to);
  }
};

}  // namespace

std::span<const rm_kernel> scan_rows() { return plain_rows<Scan>(); }

}  // namespace rm::cpu
