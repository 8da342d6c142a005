// The functions that fill in rm_abstract._core, one a subject.
#pragma once

#include <pybind11/pybind11.h>

#include "autograd/optimizers.hpp"

namespace rm::bindings {

void bind_errors(pybind11::module_& m);   // rm::Error -> _core.CoreError(message, code, reason)
void bind_options(pybind11::module_& m);  // _core.options
void bind_cache(pybind11::module_& m);    // _core.cache
void bind_backend(pybind11::module_& m);  // _core.backend
void bind_control(pybind11::module_& m);  // _core.control
void bind_ir(pybind11::module_& m);       // _core.ir
void bind_selfcheck(pybind11::module_& m);  // _core.SelfCheck
void bind_autograd(pybind11::module_& m);  // _core.autograd
void bind_eager(pybind11::module_& m);  // _core.eager
void bind_generate(pybind11::module_& m);  // _core.generate
void bind_onnx(pybind11::module_& m);  // _core.onnx
void bind_program(pybind11::module_& m);  // _core.Program
void bind_training(pybind11::module_& m);
void bind_worker(pybind11::module_& m);   // _core.worker

/// An optimiser's rule from its dictionary: algorithm, and flags that are left out when false.
autograd::GroupRule group_rule(const pybind11::dict& row);

}  // namespace rm::bindings
