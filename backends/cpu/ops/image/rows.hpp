// Rows of pool, resize and group_norm.
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> pool_rows();
std::span<const rm_kernel> resize_rows();
std::span<const rm_kernel> group_norm_rows();
}  // namespace rm::cpu
