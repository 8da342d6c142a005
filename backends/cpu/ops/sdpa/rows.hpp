// Rows of `sdpa` (docs/operators.md): prefill, decode and a plain f64 form.
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {
std::span<const rm_kernel> sdpa_rows();
std::span<const rm_kernel> sdpa_backward_rows();
}  // namespace rm::cpu
