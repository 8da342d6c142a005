// A 16-bit float's value, for the kernels of one ISA.
#pragma once

#include "ops/gemm/simd.hpp"

namespace rm::cpu::quant::RM_ISA {

RM_INLINE float half_to_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  uint16_t lanes[gemm::RM_ISA::kLanes] = {h};
  return gemm::RM_ISA::F16::load(lanes)[0];
#endif
}

}  // namespace rm::cpu::quant::RM_ISA
