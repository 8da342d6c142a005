// Kernel rows of all_reduce_start and all_reduce_wait, on any device: they call a Python object, which
// has torch.distributed do the work on tensors over the plan's memory.
#pragma once

#include <pybind11/pybind11.h>

#include <span>

#include "rm/kernels.h"

namespace rm::exchange {

/// Makes `average` the object that runs the all-reduces of a group; its number is what nodes have as
/// `group`. It has `start(bucket, tensors)` and `wait(bucket, tensors)`, called with the GIL, in the
/// thread that runs the program; the tensors are gone when they return. Only a weak reference is kept.
int64_t add_group(pybind11::object average);

/// The rows. They run in a plan's own thread and cannot be part of a device's graph.
std::span<const rm_kernel> all_reduce_rows();

}  // namespace rm::exchange
