// Rows of `uniform` (docs/operators.md).
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> uniform_rows();
}  // namespace rm::cpu
