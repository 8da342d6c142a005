// Rows of `ewise`: a block interpreter over dense or strided operands.
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> ewise_rows();
}  // namespace rm::cpu
