// Rows of `rms_norm` (docs/operators.md).
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> rms_norm_rows();
}  // namespace rm::cpu
