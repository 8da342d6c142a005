// Rows of recurrent.
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> recurrent_rows();
}  // namespace rm::cpu
