// Rows of `scan` (docs/operators.md).
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> scan_rows();
}  // namespace rm::cpu
