// The gemm rows of the CPU backend, best first; the last one is the fallback.
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {

std::span<const rm_kernel> gemm_rows();

}  // namespace rm::cpu
