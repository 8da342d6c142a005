// Rows of `index_copy` (docs/operators.md).
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> index_copy_rows();
}  // namespace rm::cpu
