// Rows of sort: stable order along an axis, all of it or the first k.  NaN counts as the largest
// value, as in torch.  Ties are broken by position, which makes an in-place sort stable.  Values of
// up to four bytes become integers of that order, with the position below them.
#include "ops/sort/rows.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

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

/// A number whose order as an unsigned integer is that of the values; NaN is the largest.
template <class T>
uint32_t order_of(T v) {
  if constexpr (kIsFloat<T>) {
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(get(v)));
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return ~0u;
    if ((bits & 0x7FFFFFFFu) == 0) return 0x80000000u;  // both zeros are equal
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  } else {
    return static_cast<uint32_t>(static_cast<int32_t>(get(v))) ^ 0x80000000u;
  }
}

/// Sorts by the upper halves, keeping the order of equal ones; `spare` has room for as many.
/// Returns where the result lies: one of the two.
uint64_t* radix_sort(uint64_t* items, uint64_t* spare, int64_t n) {
  std::array<std::array<uint32_t, 256>, 4> counts{};
  for (int64_t i = 0; i < n; ++i) {
    for (size_t d = 0; d < 4; ++d) ++counts[d][items[i] >> (32 + 8 * d) & 255];
  }
  for (size_t d = 0; d < 4; ++d) {
    auto& count = counts[d];
    const size_t shift = 32 + 8 * d;
    if (count[items[0] >> shift & 255] == n) continue;  // all have this digit
    uint32_t from = 0;
    for (uint32_t& c : count) from += std::exchange(c, from);
    for (int64_t i = 0; i < n; ++i) spare[count[items[i] >> shift & 255]++] = items[i];
    std::swap(items, spare);
  }
  return items;
}

constexpr int64_t kWorthRadix = 512;  // shorter lines are sorted by comparing

/// Values of up to four bytes: order and position in one integer, so that equal ones cannot be.
template <class T>
void run_short_keys(const Line& l) {
  const auto* x = static_cast<const T*>(l.x);
  auto* items = static_cast<uint64_t*>(l.items);
  const uint32_t flip = l.descending ? ~0u : 0u;
  for (int64_t i = 0; i < l.n; ++i) {
    items[i] = uint64_t{order_of(x[i * l.x_stride]) ^ flip} << 32 | static_cast<uint64_t>(i);
  }
  if (l.k < l.n / 8 || (l.k < l.n && l.n < kWorthRadix)) {
    std::partial_sort(items, items + l.k, items + l.n);
  } else if (l.n < kWorthRadix) {
    std::sort(items, items + l.n);
  } else {
    items = radix_sort(items, items + l.n, l.n);
  }
  auto* values = static_cast<T*>(l.values);
  for (int64_t i = 0; i < l.k; ++i) {
    const auto from = static_cast<int64_t>(items[i] & 0xFFFFFFFFu);
    values[i * l.v_stride] = x[from * l.x_stride];
    l.indices[i * l.i_stride] = from;
  }
}

template <class T>
void run_line(const Line& l) {
  if constexpr (sizeof(T) <= 4) {
    if (l.n <= UINT32_MAX) return run_short_keys<T>(l);
  }
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

  static std::vector<rm_edge> edges(Isa) { return {{0, 0, kWorthRadix}}; }
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
