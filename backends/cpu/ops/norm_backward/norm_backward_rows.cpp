// Rows of layer_norm_backward and rms_norm_backward: (dy, h, weight?, sum?) -> (dh, dweight, dbias). Rows
// are added to columns of their block, blocks to the result in their order: sums do not depend on threads.
#include "ops/norm_backward/rows.hpp"

#include <algorithm>
#include <cstring>

#include "common/parallel.hpp"
#include "common/plain_vec.hpp"
#include "common/row.hpp"
#include "common/rows_index.hpp"
#include "ops/norm_backward/kernels.hpp"

namespace rm::cpu {
RM_CPU_TABLE(NormBackwardTable, norm_backward_table)
namespace {

enum Input : size_t { kDy, kH, kWeight, kSum };
constexpr int64_t kBlockRows = 64;

template <bool kCentred>
class NormBackward {
 public:
  static constexpr const char* kOp = kCentred ? "layer_norm_backward" : "rms_norm_backward";
  static constexpr const char* kAlgorithm = "rows";

  static const char* reject(const Problem& p) {
    const View h = p.input(kH);
    if (!is_float(h.dtype)) return "h is not of a float type";
    if (h.rank() == 0) return "h has no axis";
    if (p.num_outputs() != (kCentred ? 3u : 2u)) return "not the results of the operator";
    for (size_t i : {kDy, kWeight, kSum}) {
      if (p.has_input(i) && p.input(i).dtype != h.dtype) return "mixed types";
    }
    for (size_t i = 0; i < p.num_outputs(); ++i) {
      if (p.output(i).dtype != h.dtype) return "mixed types";
    }
    return nullptr;
  }
  static double cost_ns(const Problem& p) {
    return 500 + 0.8 * static_cast<double>(p.input(kH).numel());
  }

  NormBackward(const Problem& p, Isa isa) {
    const View dy = p.input(kDy), h = p.input(kH), dx = p.output(0);
    const View sum = p.has_input(kSum) ? p.input(kSum) : h;
    type_ = h.dtype, bytes_ = dtype_bytes(type_), n_ = h.dim(-1);
    wide_ = type_ == DType::f64 ? 8 : 4;
    row_ = RM_CPU_PICK(isa, norm_backward_table)->find(type_);
    index_ = RowsIndex(h.shape, {dy.stride, h.stride, sum.stride, dx.stride});
    steps_[0] = dy.step(-1), steps_[1] = h.step(-1), steps_[2] = sum.step(-1), steps_[3] = dx.step(-1);
    has_sum_ = p.has_input(kSum), has_weight_ = p.has_input(kWeight);
    if (has_weight_) weight_step_ = p.input(kWeight).step(0);
    for (size_t i = 0; i + 1 < p.num_outputs(); ++i) column_step_[i] = p.output(i + 1).step(0);
    eps_ = p.attr_float("eps", 1e-5), offset_ = p.attr_float("weight_offset", 0.0);
    blocks_ = (index_.count() + kBlockRows - 1) / kBlockRows;
    threads_ = thread_limit();
  }

  // The weight, then scratch of each thread, then two rows of columns of each block.
  uint64_t workspace_bytes() const {
    return row_bytes() * (1 + 4 * static_cast<uint64_t>(threads_) + 2 * static_cast<uint64_t>(blocks_));
  }

  rm_status* launch(const rm_launch& l) const {
    if (n_ == 0) return nullptr;
    auto* memory = static_cast<char*>(l.workspace);
    if (has_weight_) copy_column(l.inputs[kWeight], weight_step_, memory);
    char* scratch = memory + row_bytes();
    char* columns = scratch + 4 * row_bytes() * static_cast<uint64_t>(threads_);
    std::memset(columns, 0, 2 * row_bytes() * static_cast<uint64_t>(blocks_));
    const double work = 0.7 * static_cast<double>(n_ * index_.count());
    parallel_ranges(blocks_, threads_for(work, blocks_, threads_), 1,
                    [&](int64_t begin, int64_t end, int thread) {
                      for (int64_t b = begin; b < end; ++b) {
                        run_block(l, b, has_weight_ ? memory : nullptr,
                                  scratch + 4 * row_bytes() * static_cast<uint64_t>(thread),
                                  columns + 2 * row_bytes() * static_cast<uint64_t>(b));
                      }
                    });
    for (size_t i = 0; i < (kCentred ? 2u : 1u); ++i) add_blocks(columns, i, l.outputs[i + 1]);
    return nullptr;
  }

 private:
  uint64_t row_bytes() const { return (static_cast<uint64_t>(n_) * wide_ + 63) & ~63ull; }

  void run_block(const rm_launch& l, int64_t block, const void* weight, char* scratch,
                 char* columns) const {
    NormBackwardRow r{};
    r.weight = weight, r.scratch = scratch, r.dweight = columns, r.dbias = columns + row_bytes();
    r.n = n_, r.dy_stride = steps_[0], r.h_stride = steps_[1], r.sum_stride = steps_[2];
    r.dx_stride = steps_[3], r.eps = eps_, r.weight_offset = offset_, r.centred = kCentred;
    const int64_t end = std::min(index_.count(), (block + 1) * kBlockRows);
    for (int64_t i = block * kBlockRows; i < end; ++i) {
      r.dy = at(l.inputs[kDy], index_.offset(0, i), bytes_);
      r.h = at(l.inputs[kH], index_.offset(1, i), bytes_);
      r.sum = has_sum_ ? at(l.inputs[kSum], index_.offset(2, i), bytes_) : nullptr;
      r.dx = at(l.outputs[0], index_.offset(3, i), bytes_);
      row_(r);
    }
  }

  /// A weight of any float type and stride, dense and of the compute type.
  void copy_column(const void* from, int64_t step, void* to) const {
    visit(type_, [&](auto x) {
      using T = decltype(x);
      if constexpr (kIsFloat<T>) {
        using W = std::conditional_t<std::is_same_v<T, double>, double, float>;
        for (int64_t j = 0; j < n_; ++j) {
          static_cast<W*>(to)[j] = static_cast<W>(get(static_cast<const T*>(from)[j * step]));
        }
      }
      return 0;
    });
  }

  void add_blocks(char* columns, size_t which, void* to) const {
    visit(type_, [&](auto x) {
      using T = decltype(x);
      if constexpr (kIsFloat<T>) {
        using W = std::conditional_t<std::is_same_v<T, double>, double, float>;
        auto* sum = reinterpret_cast<W*>(columns + which * row_bytes());
        for (int64_t b = 1; b < blocks_; ++b) {
          const auto* more = reinterpret_cast<const W*>(
              columns + (2 * static_cast<uint64_t>(b) + which) * row_bytes());
          for (int64_t j = 0; j < n_; ++j) sum[j] += more[j];
        }
        for (int64_t j = 0; j < n_; ++j) {
          put(blocks_ == 0 ? W{} : sum[j], static_cast<T*>(to) + j * column_step_[which]);
        }
      }
      return 0;
    });
  }

  NormBackwardFn row_;
  RowsIndex index_;
  DType type_;
  int64_t bytes_, n_, blocks_, steps_[4] = {}, column_step_[2] = {1, 1}, weight_step_ = 1;
  uint64_t wide_;
  double eps_, offset_;
  bool has_sum_, has_weight_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> layer_norm_backward_rows() { return isa_rows<NormBackward<true>>(); }
std::span<const rm_kernel> rms_norm_backward_rows() { return isa_rows<NormBackward<false>>(); }

}  // namespace rm::cpu
