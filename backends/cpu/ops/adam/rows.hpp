// Rows of `adam`: one pass over a parameter, its gradient and its moments.
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> adam_rows();
}  // namespace rm::cpu
