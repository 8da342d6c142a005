// The gemm rows of the CPU backend, best first; the last one is the fallback.
#pragma once

#include <span>
#include <string>

#include "rm/kernels.h"

namespace rm::cpu {

std::span<const rm_kernel> gemm_rows();

/// ";onednn=3.2.0" when the library is loaded, else "".
std::string gemm_library_fingerprint();

}  // namespace rm::cpu
