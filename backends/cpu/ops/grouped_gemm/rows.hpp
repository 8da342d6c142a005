// The rows of grouped_gemm, best first; the last one is the fallback.
#pragma once

#include <span>

#include "rm/kernels.h"

namespace rm::cpu {

std::span<const rm_kernel> grouped_gemm_rows();

}  // namespace rm::cpu
