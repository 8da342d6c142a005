// What the steps that plans fuse should give (docs/operators.md: linears, quant_linears, append_sdpa,
// adams, gemm_ewise, slopes, small_steps). They are no operators of the graph, so src/ops has no reference of them; these are made of
// those it has.
#pragma once

#include <string_view>
#include <vector>

#include "selfcheck/expected.hpp"

namespace rm::selfcheck {

bool is_fused(std::string_view op);

/// Where operands of linears and quant_linears are: x, norm, the norm's bias, residual, then a weight's parts and its bias.
struct LinearsPlaces {
  size_t parts;  // of a weight: itself, or its integers and scales

  explicit LinearsPlaces(std::string_view op) : parts(op == "quant_linears" ? 2 : 1) {}
  static constexpr size_t kNorm = 1, kNormBias = 2, kResidual = 3;
  size_t weight(size_t i) const { return 4 + (parts + 1) * i; }
  size_t bias(size_t i) const { return weight(i) + parts; }
  bool is_quantised() const { return parts == 2; }
};

/// As `expected`, for one of these.
std::vector<Part> expected_fused(const Shape& shape, const std::vector<Filled>& inputs,
                                 const std::vector<Filled>& before);

}  // namespace rm::selfcheck
