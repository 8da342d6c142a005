// A 16-bit float's value, for the kernels of one ISA.
#pragma once

#include "ops/gemm/elements.hpp"

namespace rm::cpu::quant::RM_ISA {

RM_INLINE float half_to_float(uint16_t h) { return cpu::RM_ISA::widen(f16{h}); }

RM_INLINE uint16_t float_to_half(float x) {
  f16 h;
  cpu::RM_ISA::narrow(x, &h);
  return h.bits;
}

}  // namespace rm::cpu::quant::RM_ISA
