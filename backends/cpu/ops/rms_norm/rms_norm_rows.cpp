// Rows of rms_norm: (x, weight?, residual?) -> (y, sum?).
#include "ops/rms_norm/rows.hpp"

#include "common/norm.hpp"

namespace rm::cpu {
RM_CPU_TABLE(NormTable, rms_norm_table)
namespace {

struct RmsNorm {
  static constexpr const char* kOp = "rms_norm";
  static constexpr int kWeight = 1, kBias = -1, kResidual = 2;
  static const NormTable* table(Isa isa) { return RM_CPU_PICK(isa, rms_norm_table); }
};

}  // namespace

std::span<const rm_kernel> rms_norm_rows() { return isa_rows<Norm<RmsNorm>>(); }

}  // namespace rm::cpu
