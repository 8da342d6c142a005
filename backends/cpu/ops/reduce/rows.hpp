// Rows of `reduce` (docs/operators.md).
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> reduce_rows();
}  // namespace rm::cpu
