// What plugin.cpp knows of the operators: their rows and libraries.
#pragma once

#include <string>
#include <vector>

#include "rm/kernels.h"

namespace rm::cpu {

/// Rows of every operator, in the order of docs/operators.md.
std::vector<rm_kernel> all_rows();

/// ";onednn=3.9.1" when the library is loaded, else "".
std::string kernel_library_fingerprint();

}  // namespace rm::cpu
