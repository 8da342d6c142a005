// Rows of cross_entropy: (logits, target) -> (loss, lse), and of its gradient: (logits, target, lse, dloss)
// -> dlogits. Every target is checked before it is used.
#include "ops/cross_entropy/rows.hpp"

#include "common/parallel.hpp"
#include "common/row.hpp"
#include "ops/cross_entropy/kernels.hpp"

namespace rm::cpu {
RM_CPU_TABLE(LossTable, loss_table)
namespace {

double number(const void* at, int64_t i, bool wide) {
  return wide ? static_cast<const double*>(at)[i] : static_cast<const float*>(at)[i];
}

void set_number(void* at, int64_t i, bool wide, double x) {
  if (wide) {
    static_cast<double*>(at)[i] = x;
  } else {
    static_cast<float*>(at)[i] = static_cast<float>(x);
  }
}

template <bool kBackward>
class CrossEntropy {
 public:
  static constexpr const char* kOp = kBackward ? "cross_entropy_backward" : "cross_entropy";
  static constexpr const char* kAlgorithm = "rows";

  static const char* reject(const Problem& p) {
    const View x = p.input(0), target = p.input(1);
    if (!is_float(x.dtype) || x.rank() != 2) return "logits are not [R, V] of a float type";
    if (target.dtype != DType::i64 || target.rank() != 1) return "targets are not [R] of i64";
    const DType wide = x.dtype == DType::f64 ? x.dtype : DType::f32;
    for (size_t i = 0; i < 2; ++i) {
      const View v = kBackward ? p.input(2 + i) : p.output(i);
      if (v.dtype != wide || v.rank() != 1) return "what belongs to a row is of another type";
    }
    return nullptr;
  }
  static double cost_ns(const Problem& p) {
    return 300 + 1.0 * static_cast<double>(p.input(0).numel());
  }

  CrossEntropy(const Problem& p, Isa isa) {
    const View x = p.input(0);
    wide_ = x.dtype == DType::f64;
    bytes_ = dtype_bytes(x.dtype), rows_ = x.dim(0), n_ = x.dim(1);
    x_[0] = x.step(0), x_[1] = x.step(1);
    target_step_ = p.input(1).step(0);
    for (size_t i = 0; i < 2; ++i) {
      number_step_[i] = (kBackward ? p.input(2 + i) : p.output(i)).step(0);
    }
    if (kBackward) dx_[0] = p.output(0).step(0), dx_[1] = p.output(0).step(1);
    const LossTable* table = RM_CPU_PICK(isa, loss_table);
    row_ = kBackward ? table->backward(x.dtype) : table->forward(x.dtype);
    threads_ = thread_limit();
  }

  uint64_t workspace_bytes() const { return row_bytes() * static_cast<uint64_t>(threads_); }

  rm_status* launch(const rm_launch& l) const {
    auto* memory = static_cast<char*>(l.workspace);
    const double work = 0.8 * static_cast<double>(n_ * rows_);
    bool failed = false;
    parallel_ranges(rows_, threads_for(work, rows_, threads_), 1,
                    [&](int64_t begin, int64_t end, int thread) {
                      LossRow r{};
                      r.scratch = memory + row_bytes() * static_cast<uint64_t>(thread);
                      r.n = n_, r.x_stride = x_[1], r.dx_stride = dx_[1];
                      for (int64_t i = begin; i < end; ++i) {
                        if (run(l, i, r)) continue;
#pragma omp atomic write
                        failed = true;
                      }
                    });
    if (!failed) return nullptr;
    return plugin::fail(RM_OUT_OF_RANGE, std::string("[") + kOp + "] expected targets in [0, " +
                                             std::to_string(n_) + "), got one outside");
  }

 private:
  uint64_t row_bytes() const { return (static_cast<uint64_t>(n_) * (wide_ ? 8 : 4) + 63) & ~63ull; }

  bool run(const rm_launch& l, int64_t i, LossRow& r) const {
    r.target = static_cast<const int64_t*>(l.inputs[1])[i * target_step_];
    if (r.target < 0 || r.target >= n_) return false;
    r.x = static_cast<const char*>(l.inputs[0]) + i * x_[0] * bytes_;
    if (kBackward) {
      r.lse = number(l.inputs[2], i * number_step_[0], wide_);
      r.dloss = number(l.inputs[3], i * number_step_[1], wide_);
      r.dx = static_cast<char*>(l.outputs[0]) + i * dx_[0] * bytes_;
      row_(r);
    } else {
      row_(r);
      set_number(l.outputs[0], i * number_step_[0], wide_, r.loss);
      set_number(l.outputs[1], i * number_step_[1], wide_, r.lse);
    }
    return true;
  }

  LossFn row_;
  int64_t bytes_, rows_, n_, x_[2], dx_[2] = {}, target_step_, number_step_[2];
  bool wide_;
  int threads_;
};

}  // namespace

std::span<const rm_kernel> cross_entropy_rows() { return isa_rows<CrossEntropy<false>>(); }
std::span<const rm_kernel> cross_entropy_backward_rows() { return isa_rows<CrossEntropy<true>>(); }

}  // namespace rm::cpu
