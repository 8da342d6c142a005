// Rows of reduce: every result folds its own elements, in index order, on one thread; results are
// shared over threads.  Dense results over strided folds go column block by column block.
#include "ops/reduce/rows.hpp"

#include <limits>

#include "common/parallel.hpp"
#include "common/plain_vec.hpp"
#include "common/row.hpp"
#include "common/rows_index.hpp"
#include "ops/reduce/kernels.hpp"

namespace rm::cpu {
RM_CPU_TABLE(ReduceTable, reduce_table)
namespace {

constexpr int64_t kColumns = 256;   // results of a column block
constexpr int64_t kRowPiece = 256;  // rows added in f32 before the f64 total takes them

ReduceKind to_kind(std::string_view name) {
  static constexpr const char* const names[] = {"sum", "mean", "max",    "min",   "prod",
                                                "any", "all",  "argmax", "argmin"};
  for (int i = 0; i < 9; ++i) {
    if (name == names[i]) return static_cast<ReduceKind>(i);
  }
  throw std::invalid_argument("[reduce] expected a kind of docs/operators.md, got " +
                              std::string(name));
}

ReduceState identity(ReduceKind kind, DType type) {
  ReduceState s{0, 0, -1};
  if (kind == ReduceKind::prod || kind == ReduceKind::all)
    s.real = static_cast<double>(s.whole = 1);
  if (kind == ReduceKind::max || kind == ReduceKind::min) {
    const bool max = kind == ReduceKind::max;
    const double inf = std::numeric_limits<double>::infinity();
    s.real = max ? -inf : inf;
    if (!is_float(type)) {
      visit(type, [&](auto zero) {
        using T = decltype(zero);
        if constexpr (std::is_same_v<T, boolean>) {
          s.whole = !max;
        } else if constexpr (std::is_integral_v<T>) {
          s.whole = max ? std::numeric_limits<T>::min() : std::numeric_limits<T>::max();
        }
      });
    }
  }
  return s;
}

class Reduce {
 public:
  static constexpr const char* kOp = "reduce";
  static constexpr const char* kAlgorithm = "folds";

  static const char* reject(const Problem&) { return nullptr; }
  static std::vector<rm_edge> edges(Isa) { return {{0, 0, kColumns}, {0, 0, kReducePiece}}; }
  static double cost_ns(const Problem& p) {
    return 300 + 0.5 * static_cast<double>(p.input(0).numel());
  }

  Reduce(const Problem& p, Isa isa) {
    const View x = p.input(0), y = p.output(0);
    type_ = x.dtype;
    out_type_ = y.dtype;
    kind_ = to_kind(p.attr_string("kind", "sum"));
    split_axes(p, x, y);
    bytes_ = dtype_bytes(type_);
    const ReduceTable* table = RM_CPU_PICK(isa, reduce_table);
    fold_ = table->find(type_, kind_);
    columns_ = table->columns(type_, kind_);
    // Columns pay when results are dense in x and the folds are not.
    if (kept_.strides[0].back() != 1 || kept_.shape.back() < 8 || folds_.strides[0].back() == 1 ||
        folds_.numel() == 1) {
      columns_ = nullptr;
    }
    kept_inner_ = kept_.shape.back();
    index_ = RowsIndex(kept_.shape, kept_.strides, columns_ ? 1 : 0);
    fold_index_ = RowsIndex(folds_.shape, folds_.strides, 1);
    threads_ = thread_limit();
  }

  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    const int64_t results = kept_.numel();
    if (results == 0) return nullptr;
    const double work =
        0.4 * static_cast<double>(results) * static_cast<double>(folds_.numel() + 4);
    if (columns_) {
      const int64_t blocks = (kept_inner_ + kColumns - 1) / kColumns,
                    tasks = index_.count() * blocks;
      parallel_ranges(tasks, threads_for(work, tasks, threads_), 1,
                      [&](int64_t begin, int64_t end, int) {
                        for (int64_t i = begin; i < end; ++i) {
                          column_block(l, i / blocks, i % blocks * kColumns);
                        }
                      });
      return nullptr;
    }
    parallel_ranges(results, threads_for(work, results, threads_), 1,
                    [&](int64_t begin, int64_t end, int) {
                      for (int64_t i = begin; i < end; ++i) one(l, i);
                    });
    return nullptr;
  }

 private:
  void split_axes(const Problem& p, const View& x, const View& y) {
    std::vector<bool> reduced(x.shape.size(), false);
    const auto axes = p.attr_ints("axes");
    for (int64_t axis : axes) {
      if (x.rank() > 0) reduced[static_cast<size_t>(normal_axis(axis, x.rank()))] = true;
    }
    std::vector<int64_t> kept, kept_x, kept_y, fold, fold_x;
    for (size_t i = 0; i < x.shape.size(); ++i) {
      if (reduced[i]) {
        fold.push_back(x.shape[i]);
        fold_x.push_back(x.stride[i]);
      } else {
        kept.push_back(x.shape[i]);
        kept_x.push_back(x.stride[i]);
        kept_y.push_back(y.stride[i]);
      }
    }
    kept_ = make_nest(kept, {kept_x, kept_y}, -1);
    // Only argmax and argmin count positions; the others may fold in memory order.
    const bool ordered = kind_ == ReduceKind::argmax || kind_ == ReduceKind::argmin;
    folds_ = make_nest(fold, {fold_x}, ordered ? -1 : 0);
  }

  void one(const rm_launch& l, int64_t i) const {
    ReduceState s = identity(kind_, type_);
    const char* x = at(l.inputs[0], index_.offset(0, i), bytes_);
    const int64_t run = folds_.shape.back(), stride = folds_.strides[0].back();
    for (int64_t f = 0; run > 0 && f < fold_index_.count(); ++f) {
      fold_(x + fold_index_.offset(0, f) * bytes_, stride, run, f * run, &s);
    }
    write(l, index_.offset(1, i), s);
  }

  void column_block(const rm_launch& l, int64_t row, int64_t from) const {
    const int64_t n = std::min(kColumns, kept_inner_ - from);
    const char* x = at(l.inputs[0], index_.offset(0, row) + from, bytes_);
    const int64_t run = folds_.shape.back(), stride = folds_.strides[0].back();
    const ReduceState start = identity(kind_, type_);
    double total[kColumns];
    for (int64_t i = 0; i < n; ++i) total[i] = start.real;
    float acc[kColumns];
    for (int64_t f = 0; run > 0 && f < fold_index_.count(); ++f) {
      for (int64_t r = 0; r < run; r += kRowPiece) {
        for (int64_t i = 0; i < n; ++i) acc[i] = static_cast<float>(start.real);
        columns_(x + (fold_index_.offset(0, f) + r * stride) * bytes_, stride,
                 std::min(kRowPiece, run - r), n, acc);
        for (int64_t i = 0; i < n; ++i) total[i] = join(total[i], acc[i]);
      }
    }
    const int64_t y = index_.offset(1, row), step = kept_.strides[1].back();
    for (int64_t i = 0; i < n; ++i) write(l, y + (from + i) * step, {total[i], 0, -1});
  }

  double join(double a, double b) const {
    if (kind_ == ReduceKind::max) return a != a ? a : (b > a || b != b) ? b : a;
    if (kind_ == ReduceKind::min) return a != a ? a : (b < a || b != b) ? b : a;
    return a + b;
  }

  void write(const rm_launch& l, int64_t offset, const ReduceState& s) const {
    char* y = at(l.outputs[0], offset, dtype_bytes(out_type_));
    visit(out_type_, [&](auto zero) {
      using T = decltype(zero);
      auto* to = reinterpret_cast<T*>(y);
      if (kind_ == ReduceKind::argmax || kind_ == ReduceKind::argmin) {
        put(std::max<int64_t>(s.index, 0), to);
      } else if (kind_ == ReduceKind::mean) {
        const double sum = is_float(type_) ? s.real : static_cast<double>(s.whole);
        put(sum / static_cast<double>(folds_.numel()), to);
      } else if (is_float(type_)) {
        put(s.real, to);
      } else {
        put(s.whole, to);
      }
    });
  }

  ReduceKind kind_;
  DType type_, out_type_;
  Nest kept_, folds_;
  RowsIndex index_, fold_index_;
  ReduceFn fold_;
  ReduceColumnsFn columns_;
  int64_t bytes_, kept_inner_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> reduce_rows() { return isa_rows<Reduce>(); }

}  // namespace rm::cpu
