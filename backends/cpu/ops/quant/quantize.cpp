// The row of quantize: a weight's rows over threads. Equal to the reference bit for bit.
#include <cstring>
#include <stdexcept>
#include <vector>

#include "common/parallel.hpp"
#include "common/row.hpp"
#include "ops/quant/kernels.hpp"
#include "ops/quant/problem.hpp"
#include "ops/quant/rows.hpp"
#include "ops/quant/tile.hpp"

namespace rm::cpu {
namespace quant {
RM_CPU_TABLE(QuantSet, quant_kernels)
}
namespace {

class Quantize {
 public:
  static constexpr const char* kOp = "quantize";
  static constexpr const char* kAlgorithm = "rows";

  static const char* reject(const Problem& p) {
    const View w = p.input(0);
    if (!is_float32_class(w.dtype)) return "the weight is neither f32, bf16 nor f16";
    if (w.rank() != 2) return "the weight's rank is not 2";
    if (p.attr_int("pairs", 0) != 0) return "pairs are for GPUs";
    for (size_t i = 0; i < 3 && p.has_output(i); ++i) {
      const View v = p.output(i);
      if (v.rank() != 2 || (v.dim(1) > 1 && v.step(1) != 1)) return "a result is not dense";
    }
    return nullptr;
  }
  static double cost_ns(const Problem& p) { return 4.0 * static_cast<double>(p.input(0).numel()); }

  Quantize(const Problem& p, Isa isa) {
    using namespace quant;
    const View w = p.input(0), q = p.output(0), scale = p.output(1);
    kernel_ = RM_CPU_PICK(isa, quant_kernels)
                  ->quantize[w.dtype == DType::f32    ? gemm::kF32
                             : w.dtype == DType::bf16 ? gemm::kBF16
                                                      : gemm::kF16];
    read_grouping(p, &args_.bits, &args_.group, &tile_);
    args_.symmetric = p.attr_int("symmetric", 1) != 0;
    args_.k = w.dim(1);
    args_.col_stride = w.step(1);
    args_.row_bytes = (args_.k + 63) / 64 * 8 * args_.bits;
    rows_ = w.dim(0);
    row_bytes_of_w_ = w.step(0) * dtype_bytes(w.dtype);
    q_row_ = q.step(0);
    scale_row_ = scale.step(0);
    if (q.dim(1) != args_.row_bytes || p.has_output(2) == args_.symmetric) {
      throw std::invalid_argument("[quantize] expected results as docs/operators.md has them");
    }
    groups_ = (args_.k + args_.group - 1) / args_.group;
    const bool dense = q_row_ == args_.row_bytes && scale_row_ == groups_;
    if (tile_ == quant::kTile && (!args_.symmetric || (rows_ > 1 && args_.k > 0 && !dense))) {
      throw std::invalid_argument("[quantize] expected dense tiles of symmetric weights");
    }
    if (!args_.symmetric) zero_row_ = p.output(2).step(0);
  }
  uint64_t workspace_bytes() const { return 0; }

  rm_status* launch(const rm_launch& l) const {
    const int threads =
        threads_for(static_cast<double>(rows_ * args_.k) * 3, rows_, thread_limit());
    const int64_t tiled = tile_ == quant::kTile ? rows_ / quant::kTile * quant::kTile : 0;
    parallel_ranges(tiled, threads, quant::kTile,
                    [&](int64_t begin, int64_t end, int) { tiles(l, begin, end); });
    parallel_ranges(rows_ - tiled, threads, 1, [&](int64_t begin, int64_t end, int) {
      for (int64_t r = tiled + begin; r < tiled + end; ++r) {
        row(l, r, static_cast<uint8_t*>(l.outputs[0]) + r * q_row_,
            static_cast<uint16_t*>(l.outputs[1]) + r * scale_row_);
      }
    });
    return nullptr;
  }

 private:
  void row(const rm_launch& l, int64_t r, uint8_t* q, uint16_t* scale) const {
    quant::QuantizeArgs a = args_;
    a.src = static_cast<const char*>(l.inputs[0]) + r * row_bytes_of_w_;
    a.q = q, a.scale = scale;
    if (!a.symmetric) a.zero = static_cast<uint16_t*>(l.outputs[2]) + r * zero_row_;
    kernel_(a);
  }

  /// Rows [begin, end), whole tiles: four bytes and a scale of each of eight rows in turn.
  void tiles(const rm_launch& l, int64_t begin, int64_t end) const {
    constexpr int64_t kTile = quant::kTile;
    std::vector<uint8_t> q(static_cast<size_t>(args_.row_bytes));
    std::vector<uint16_t> scale(static_cast<size_t>(groups_));
    for (int64_t r = begin; r < end; ++r) {
      row(l, r, q.data(), scale.data());
      const int64_t first = r / kTile * kTile;
      uint8_t* out = static_cast<uint8_t*>(l.outputs[0]) + first * args_.row_bytes + r % kTile * 4;
      for (int64_t u = 0; u < args_.row_bytes / 4; ++u) {
        std::memcpy(out + u * 4 * kTile, q.data() + u * 4, 4);
      }
      uint16_t* scales = static_cast<uint16_t*>(l.outputs[1]) + first * groups_ + r % kTile;
      for (int64_t g = 0; g < groups_; ++g) scales[g * kTile] = scale[static_cast<size_t>(g)];
    }
  }

  void (*kernel_)(const quant::QuantizeArgs&) = nullptr;
  quant::QuantizeArgs args_{};
  int64_t rows_ = 0, row_bytes_of_w_ = 0, q_row_ = 0, scale_row_ = 0, zero_row_ = 0;
  int64_t groups_ = 0, tile_ = 1;
};

}  // namespace

std::span<const rm_kernel> quantize_rows() { return isa_rows<Quantize>(); }

}  // namespace rm::cpu
