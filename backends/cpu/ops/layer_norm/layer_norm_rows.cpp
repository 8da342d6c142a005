// Rows of layer_norm: (x, weight?, bias?, residual?) -> (y, sum?).
#include "ops/layer_norm/rows.hpp"

#include "common/norm.hpp"

namespace rm::cpu {
RM_CPU_TABLE(NormTable, layer_norm_table)
namespace {

struct LayerNorm {
  static constexpr const char* kOp = "layer_norm";
  static constexpr int kWeight = 1, kBias = 2, kResidual = 3;
  static const NormTable* table(Isa isa) { return RM_CPU_PICK(isa, layer_norm_table); }
};

}  // namespace

std::span<const rm_kernel> layer_norm_rows() { return isa_rows<Norm<LayerNorm>>(); }

}  // namespace rm::cpu
