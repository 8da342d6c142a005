// The kernel row "aten.*": any functional ATen operator, run by libtorch on our memory.
//
// The operator allocates its results; they are then copied into the operands the host planned.
// Views of inputs, tuples and tensor lists (flattened in order) are all copied out the same way.
#pragma once

#include "rm/kernels.h"

namespace rm::torch_bridge {

const rm_kernels* kernel_rows();

}  // namespace rm::torch_bridge
