// Rows of cumsum: one running sum a line, in f64 or i64, rounded at every store.
#include "ops/cumsum/rows.hpp"

#include "common/plain_vec.hpp"
#include "common/running_lines.hpp"

namespace rm::cpu {
namespace {

template <class T, class Y>
void run_line(const RunningLines::Line& l) {
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

class Cumsum : public RunningLines {
 public:
  static constexpr const char* kOp = "cumsum";
  static constexpr const char* kAlgorithm = "lines";

  static const char* reject(const Problem&) { return nullptr; }
  static double cost_ns(const Problem& p) {
    return 100 + 1.5 * static_cast<double>(p.input(0).numel());
  }

  Cumsum(const Problem& p, Isa)
      : RunningLines(p, run_of(p.input(0).dtype, p.output(0).dtype), 1.2) {}

 private:
  static Run run_of(DType from_type, DType to_type) {
    return visit(from_type, [&](auto from) {
      return visit(to_type,
                   [&](auto to) -> Run { return run_line<decltype(from), decltype(to)>; });
    });
  }
};

}  // namespace

std::span<const rm_kernel> cumsum_rows() { return plain_rows<Cumsum>(); }

}  // namespace rm::cpu
