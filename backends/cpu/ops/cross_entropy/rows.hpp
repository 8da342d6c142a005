// Rows of `cross_entropy` and `cross_entropy_backward` (docs/operators.md).
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> cross_entropy_rows();
std::span<const rm_kernel> cross_entropy_backward_rows();
}  // namespace rm::cpu
