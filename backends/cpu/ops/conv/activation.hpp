// What becomes of a finished sum. NaN passes through all of them; the numbers are
// conv::Activation's. Included by ISA sources only.
#pragma once

#include "common/vec_math.hpp"

namespace rm::cpu::conv::RM_ISA {
namespace {

using namespace rm::cpu::RM_ISA;

RM_INLINE vf activate(int kind, vf v) {
  switch (kind) {
    case 1:
      return v < 0.0f ? vf{} : v;
    case 2:
      return vgelu(v);
    case 3:
      return vgelu_tanh(v);
    case 4:
      return vsilu(v);
    case 5:
      return vtanh(v);
    case 6:
      return vsigmoid(v);
    case 7: {
      vf gate = v + 3.0f;
      gate = gate < 0.0f ? vf{} : gate;
      return v * (gate > 6.0f ? vset(6.0f) : gate) * (1.0f / 6.0f);
    }
    default:
      return v;
  }
}

}  // namespace
}  // namespace rm::cpu::conv::RM_ISA
