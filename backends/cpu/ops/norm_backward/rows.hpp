// Rows of `layer_norm_backward` and `rms_norm_backward` (docs/operators.md).
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> layer_norm_backward_rows();
std::span<const rm_kernel> rms_norm_backward_rows();
}  // namespace rm::cpu
