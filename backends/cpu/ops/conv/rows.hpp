// Rows of conv.
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> conv_rows();
}  // namespace rm::cpu
