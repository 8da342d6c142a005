// The rows of quant_linear, one a level.
#include "ops/quant/rows.hpp"

#include <omp.h>

#include <algorithm>

#include "common/row.hpp"
#include "ops/quant/linear.hpp"

namespace rm::cpu {
namespace gemm {
RM_CPU_TABLE(KernelSet, gemm_kernels)
}
namespace quant {
RM_CPU_TABLE(QuantSet, quant_kernels)
}
namespace {

const gemm::KernelSet& tiles_of(Isa isa) {
  using namespace gemm;
  return *RM_CPU_PICK(isa, gemm_kernels);
}
const quant::QuantSet& kernels_of(Isa isa) {
  using namespace quant;
  return *RM_CPU_PICK(isa, quant_kernels);
}

class Row {
 public:
  static constexpr const char* kOp = "quant_linear";
  static constexpr const char* kAlgorithm = "grouped";

  static const char* reject(const Problem& p) {
    return quant::QuantLinear::reject(quant::decode_linear(p.raw()));
  }
  /// The larger of reading the weight (14 GB/s a thread) and multiplying (half of gemm's rate).
  static double cost_ns(const Problem& p) {
    const quant::QuantProblem q = quant::decode_linear(p.raw());
    const double bytes = double(q.gemm.n) * double(q.blocks() * 4 * q.bits);
    return 1000 + std::max(bytes / 14, q.gemm.flops() / 50) / omp_get_max_threads();
  }
  Row(const Problem& p, Isa isa)
      : linear_(quant::decode_linear(p.raw()), kernels_of(isa), tiles_of(isa)) {}
  uint64_t workspace_bytes() const { return linear_.workspace_bytes(); }
  rm_status* launch(const rm_launch& l) const {
    linear_.launch(l);
    return nullptr;
  }

 private:
  quant::QuantLinear linear_;
};

}  // namespace

std::span<const rm_kernel> quant_linear_rows() { return isa_rows<Row>(); }

}  // namespace rm::cpu
