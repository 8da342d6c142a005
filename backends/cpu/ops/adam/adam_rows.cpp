// Rows of adam: operands of any strides, whose dense axes are merged into one run.
#include "ops/adam/rows.hpp"

#include <cstring>

#include "common/parallel.hpp"
#include "common/row.hpp"
#include "common/rows_index.hpp"
#include "ops/adam/kernels.hpp"

namespace rm::cpu {

RM_CPU_TABLE(AdamTable, adam_table)

namespace {

constexpr size_t kNumbersAt = 4, kLargestAt = 5, kApplyAt = 6;  // among the operands
constexpr double kNsPerElement = 1.0;  // one thread, AVX2, data in the last-level cache
constexpr int64_t kGrain = 1024;

class Adam {
 public:
  static constexpr const char* kOp = "adam";
  static constexpr const char* kAlgorithm = "pass";

  static const char* reject(const Problem& p) {
    const DType t = p.input(kParameter).dtype;
    if (t != DType::f32 && t != DType::f64) return "the parameter is neither f32 nor f64";
    for (size_t i = 0; i <= kLargestAt; ++i) {
      if (p.has_input(i) && p.input(i).dtype != t) return "operands have different types";
    }
    return nullptr;
  }
  static double cost_ns(const Problem& p) {
    return 200 + kNsPerElement * static_cast<double>(p.output(0).numel());
  }

  Adam(const Problem& p, Isa isa)
      : table_(RM_CPU_PICK(isa, adam_table)), wide_(p.input(0).dtype == DType::f64) {
    const View y = p.output(0);
    has_largest_ = p.has_input(kLargestAt);
    has_apply_ = p.has_input(kApplyAt);
    const std::string_view decay = p.attr_string("decay", "none");
    decay_ = decay == "gradient"    ? AdamDecay::gradient
             : decay == "parameter" ? AdamDecay::parameter
                                    : AdamDecay::none;
    maximize_ = p.attr_int("maximize", 0) != 0;
    if (p.num_outputs() != (has_largest_ ? 4u : 3u) || p.input(kNumbersAt).numel() != kAdamNumbers) {
      throw std::invalid_argument("[adam] expected three results, four with a largest square");
    }
    number_step_ = p.input(kNumbersAt).step(0);
    std::vector<std::vector<int64_t>> strides(kAdamPointers, y.stride);  // of absent ones: any
    const auto take = [&](int pointer, const View& v) {
      if (v.shape != y.shape) {
        throw std::invalid_argument("[adam] expected a gradient and states of the parameter's shape");
      }
      strides[static_cast<size_t>(pointer)] = v.stride;
    };
    for (int i = kParameter; i <= kSquare; ++i) take(i, p.input(static_cast<size_t>(i)));
    if (has_largest_) take(kLargest, p.input(kLargestAt));
    for (size_t i = 0; i < p.num_outputs(); ++i) take(kNewParameter + static_cast<int>(i), p.output(i));
    const Nest nest = make_nest(y.shape, strides, kNewParameter);
    inner_ = nest.shape.back();
    for (int i = 0; i < kAdamPointers; ++i) step_[i] = nest.strides[static_cast<size_t>(i)].back();
    rows_ = RowsIndex(nest.shape, nest.strides);
    total_ = y.numel();
  }

  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    if (total_ == 0) return nullptr;
    AdamArgs all{};
    for (int i = kParameter; i <= kSquare; ++i) all.pointer[i] = const_cast<void*>(l.inputs[i]);
    for (int i = 0; i < (has_largest_ ? 4 : 3); ++i) all.pointer[kNewParameter + i] = l.outputs[i];
    if (has_largest_) all.pointer[kLargest] = const_cast<void*>(l.inputs[kLargestAt]);
    std::memcpy(all.step, step_, sizeof step_);
    all.numbers = l.inputs[kNumbersAt];
    all.number_step = number_step_;
    all.decay = decay_;
    all.maximize = maximize_;
    const bool applies = !has_apply_ || *static_cast<const bool*>(l.inputs[kApplyAt]);
    const int threads = threads_for(kNsPerElement * static_cast<double>(total_), total_, thread_limit());
    const bool by_row = rows_.count() > 1;
    parallel_ranges(by_row ? rows_.count() : inner_, threads, by_row ? 1 : kGrain,
                    [&](int64_t begin, int64_t end, int) {
                      if (!by_row) return run(all, 0, begin, end - begin, applies);
                      for (int64_t r = begin; r < end; ++r) run(all, r, 0, inner_, applies);
                    });
    return nullptr;
  }

 private:
  /// `n` elements of a row from `first` on.
  void run(const AdamArgs& all, int64_t row, int64_t first, int64_t n, bool applies) const {
    AdamArgs part = all;
    const int64_t bytes = wide_ ? 8 : 4;
    for (int i = 0; i < kAdamPointers; ++i) {
      part.pointer[i] =
          at(all.pointer[i], rows_.offset(static_cast<size_t>(i), row) + first * step_[i], bytes);
    }
    part.n = n;
    if (!applies) return keep(part, bytes);
    wide_ ? table_->f64(part) : table_->f32(part);
  }

  /// Results that are what their operands are.
  static void keep(const AdamArgs& a, int64_t bytes) {
    constexpr int kPairs[][2] = {{kParameter, kNewParameter}, {kMean, kNewMean},
                                 {kSquare, kNewSquare},       {kLargest, kNewLargest}};
    for (const auto& [from, to] : kPairs) {
      if (a.pointer[from] == nullptr || a.pointer[from] == a.pointer[to]) continue;
      for (int64_t i = 0; i < a.n; ++i) {
        std::memcpy(at(a.pointer[to], i * a.step[to], bytes),
                    at(a.pointer[from], i * a.step[from], bytes), static_cast<size_t>(bytes));
      }
    }
  }

  const AdamTable* table_;
  bool wide_, has_largest_ = false, has_apply_ = false, maximize_ = false;
  AdamDecay decay_ = AdamDecay::none;
  RowsIndex rows_;
  int64_t step_[kAdamPointers] = {};
  int64_t inner_ = 1, total_ = 0, number_step_ = 1;
};

}  // namespace

std::span<const rm_kernel> adam_rows() {
  // None for AVX-512 before it ran on a processor that has it.
  static const std::vector<rm_kernel> rows = {
#if RM_CPU_X86
    make_row<Adam, Isa::avx2>(),
#endif
    make_row<Adam, Isa::baseline>()
  };
  return rows;
}

}  // namespace rm::cpu
