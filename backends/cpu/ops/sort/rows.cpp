// Rows of sort: stable order along an axis, all of it or the first k.  NaN counts as the largest
// value, as in torch.  Ties are broken by position, which makes an in-place sort stable.
#include "ops/sort/rows.hpp"

#include <algorithm>

#include "common/lines.hpp"
#include "common/parallel.hpp"
#include "common/plain_vec.hpp"
#include "common/row.hpp"

namespace rm::cpu {
namespace {

template <class W>
struct Item {
  W key;
  int64_t position;
};

template <class W>
bool less_key(W a, W b) {
  if constexpr (std::is_floating_point_v<W>) {
    if (a != a || b != b) return a == a;  // only a number is less than NaN
  }
  return a < b;
}

struct Line {
  const void* x;
  void* values;
  int64_t* indices;
  void* items;
  int64_t n, k, x_stride, v_stride, i_stride;
  bool descending;
};

template <class T>
void run_line(const Line& l) {
  using W = Wide<T>;
  const auto* x = static_cast<const T*>(l.x);
  auto* items = static_cast<Item<W>*>(l.items);
  for (int64_t i = 0; i < l.n; ++i) items[i] = {get(x[i * l.x_stride]), i};
  const bool descending = l.descending;
  const auto before = [descending](const Item<W>& a, const Item<W>& b) {
    const bool less = less_key(a.key, b.key), greater = less_key(b.key, a.key);
    if (less != greater && !(a.key != a.key && b.key != b.key)) return descending ? greater : less;
    return a.position < b.position;
  };
  if (l.k < l.n) {
    std::partial_sort(items, items + l.k, items + l.n, before);
  } else {
    std::sort(items, items + l.n, before);
  }
  auto* values = static_cast<T*>(l.values);
  for (int64_t i = 0; i < l.k; ++i) {
    values[i * l.v_stride] = x[items[i].position * l.x_stride];
    l.indices[i * l.i_stride] = items[i].position;
  }
}

class Sort {
 public:
  static constexpr const char* kOp = "sort";
  static constexpr const char* kAlgorithm = "lines";

  static const char* reject(const Problem& p) {
    if (p.output(1).dtype != DType::i64) return "indices are not i64";
    return p.output(0).dtype == p.input(0).dtype ? nullptr : "values and x have different types";
  }
  static double cost_ns(const Problem& p) {
    return 200 + 40.0 * static_cast<double>(p.input(0).numel());
  }

  Sort(const Problem& p, Isa) {
    View x = p.input(0), values = p.output(0), indices = p.output(1);
    at_least_one_axis(x);
    at_least_one_axis(values);
    at_least_one_axis(indices);
    const int axis = normal_axis(p.attr_int("axis", -1), x.rank());
    const int64_t k = p.attr_int("k", -1);
    line_ = {nullptr,
             nullptr,
             nullptr,
             nullptr,
             x.dim(axis),
             values.dim(axis),
             x.step(axis),
             values.step(axis),
             indices.step(axis),
             p.attr_int("descending", 0) != 0};
    if (line_.k > line_.n || (k >= 0 && k != line_.k)) {
      throw std::invalid_argument("[sort] expected results of k elements along the axis, got " +
                                  std::to_string(line_.k));
    }
    bytes_ = dtype_bytes(x.dtype);
    lines_ = lines_along(axis, x.shape, {x.stride, values.stride, indices.stride});
    run_ =
        visit(x.dtype, [](auto zero) -> void (*)(const Line&) { return run_line<decltype(zero)>; });
    threads_ = thread_limit();
  }

  uint64_t workspace_bytes() const { return line_bytes() * static_cast<uint64_t>(threads_); }

  rm_status* launch(const rm_launch& l) const {
    if (line_.k == 0) return nullptr;
    const double work = 30.0 * static_cast<double>(line_.n * lines_.count());
    parallel_ranges(lines_.count(), threads_for(work, lines_.count(), threads_), 1,
                    [&](int64_t begin, int64_t end, int thread) {
                      Line line = line_;
                      line.items = static_cast<char*>(l.workspace) +
                                   line_bytes() * static_cast<uint64_t>(thread);
                      for (int64_t i = begin; i < end; ++i) {
                        line.x = at(l.inputs[0], lines_.offset(0, i), bytes_);
                        line.values = at(l.outputs[0], lines_.offset(1, i), bytes_);
                        line.indices = static_cast<int64_t*>(l.outputs[1]) + lines_.offset(2, i);
                        run_(line);
                      }
                    });
    return nullptr;
  }

 private:
  uint64_t line_bytes() const { return (static_cast<uint64_t>(line_.n) * 16 + 63) & ~63ull; }

  Line line_;
  RowsIndex lines_;
  void (*run_)(const Line&);
  int64_t bytes_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> sort_rows() { return plain_rows<Sort>(); }

}  // namespace rm::cpu
