// Rows of `scatter` (docs/operators.md).
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> scatter_rows();
}  // namespace rm::cpu
