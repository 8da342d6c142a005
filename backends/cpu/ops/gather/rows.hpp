// Rows of `gather` (docs/operators.md).
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> gather_rows();
}  // namespace rm::cpu
