// Rows of `layer_norm` (docs/operators.md).
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> layer_norm_rows();
}  // namespace rm::cpu
