// Rows of quantize and quant_linear: weights of 8 or 4 bits in groups.
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> quant_linear_rows();
std::span<const rm_kernel> quantize_rows();
}  // namespace rm::cpu
