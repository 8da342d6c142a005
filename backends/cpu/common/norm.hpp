// The row sources of layer_norm and rms_norm share this: operands, weights as f32, the row loop.
#pragma once

#include "common/norm_row.hpp"
#include "common/parallel.hpp"
#include "common/row.hpp"
#include "common/rows_index.hpp"

namespace rm::cpu {

/// `Kind` gives kOp, the operand positions and the table.
template <class Kind>
class Norm {
 public:
  static constexpr const char* kOp = Kind::kOp;
  static constexpr const char* kAlgorithm = "rows";

  static const char* reject(const Problem& p) {
    const View x = p.input(0);
    if (!is_float(x.dtype)) return "x is not of a float type";
    for (int i : {Kind::kWeight, Kind::kBias}) {
      if (i < 0 || !p.has_input(i)) continue;
      const DType w = p.input(i).dtype;
      if (x.dtype == DType::f64 ? w != DType::f64 : !is_float32_class(w)) {
        return "weight and x are of different precision classes";
      }
    }
    return nullptr;
  }
  static double cost_ns(const Problem& p) {
    return 300 + 0.4 * static_cast<double>(p.input(0).numel());
  }

  Norm(const Problem& p, Isa isa) : table_(Kind::table(isa)) {
    const View x = p.input(0), y = p.output(0);
    type_ = x.dtype;
    bytes_ = dtype_bytes(type_);
    n_ = x.dim(-1);
    eps_ = p.attr_float("eps", 1e-5);
    weight_offset_ = p.attr_float("weight_offset", 0.0);
    row_ = table_->find(type_);
    // An absent operand borrows x's strides: its offsets are computed but never used.
    const View residual = p.has_input(Kind::kResidual) ? p.input(Kind::kResidual) : x;
    const View sum = p.has_output(1) ? p.output(1) : y;
    if (residual.dtype != type_ || y.dtype != type_ || sum.dtype != type_) {
      throw std::invalid_argument(std::string("[") + kOp + "] expected results of x's type " +
                                  dtype_name(type_));
    }
    index_ = RowsIndex(x.shape, {x.stride, residual.stride, y.stride, sum.stride});
    strides_[0] = x.step(-1);
    strides_[1] = residual.step(-1);
    strides_[2] = y.step(-1);
    strides_[3] = sum.step(-1);
    for (int i : {Kind::kWeight, Kind::kBias}) {
      if (i < 0 || !p.has_input(i)) continue;
      const View w = p.input(i);
      vectors_[i == Kind::kBias] = {
          true, w.dtype, w.step(-1),
          w.step(-1) != 1 || (w.dtype != DType::f32 && type_ != DType::f64)};
    }
    has_residual_ = p.has_input(Kind::kResidual);
    has_sum_ = p.has_output(1);
    threads_ = thread_limit();
  }

  uint64_t workspace_bytes() const { return row_bytes() * (2 + static_cast<uint64_t>(threads_)); }

  rm_status* launch(const rm_launch& l) const {
    if (n_ == 0) return nullptr;
    auto* memory = static_cast<char*>(l.workspace);
    const void* weight = dense(l, Kind::kWeight, 0, memory);
    const void* bias = dense(l, Kind::kBias, 1, memory + row_bytes());
    const void* residual = has_residual_ ? l.inputs[Kind::kResidual] : nullptr;
    const double work = 0.35 * static_cast<double>(n_ * index_.count());
    const int threads = threads_for(work, index_.count(), threads_);
    parallel_ranges(index_.count(), threads, 1, [&](int64_t begin, int64_t end, int thread) {
      NormRow r{};
      r.weight = weight;
      r.bias = bias;
      r.scratch = memory + row_bytes() * (2 + static_cast<uint64_t>(thread));
      r.n = n_;
      r.x_stride = strides_[0];
      r.residual_stride = strides_[1];
      r.y_stride = strides_[2];
      r.sum_stride = strides_[3];
      r.eps = eps_;
      r.weight_offset = weight_offset_;
      for (int64_t i = begin; i < end; ++i) {
        r.x = at(l.inputs[0], index_.offset(0, i), bytes_);
        r.residual = at(residual, index_.offset(1, i), bytes_);
        r.y = at(l.outputs[0], index_.offset(2, i), bytes_);
        r.sum = has_sum_ ? at(l.outputs[1], index_.offset(3, i), bytes_) : nullptr;
        row_(r);
      }
    });
    return nullptr;
  }

 private:
  struct Vector {
    bool present = false;
    DType type = DType::f32;
    int64_t stride = 1;
    bool copied = false;
  };

  uint64_t row_bytes() const { return (static_cast<uint64_t>(n_) * 8 + 63) & ~63ull; }

  const void* dense(const rm_launch& l, int operand, int which, char* memory) const {
    const Vector& v = vectors_[which];
    if (!v.present) return nullptr;
    if (!v.copied) return l.inputs[operand];
    if (type_ == DType::f64) {
      for (int64_t i = 0; i < n_; ++i) {
        reinterpret_cast<double*>(memory)[i] =
            static_cast<const double*>(l.inputs[operand])[i * v.stride];
      }
    } else {
      table_->widen(v.type, l.inputs[operand], v.stride, reinterpret_cast<float*>(memory), n_);
    }
    return memory;
  }

  const NormTable* table_;
  NormFn row_;
  RowsIndex index_;
  DType type_;
  int64_t bytes_, n_, strides_[4];
  Vector vectors_[2];
  double eps_, weight_offset_;
  bool has_residual_ = false, has_sum_ = false;
  int threads_;
};

}  // namespace rm::cpu
