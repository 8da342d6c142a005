// Rows of `check` (docs/operators.md).
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> check_rows();
}  // namespace rm::cpu
