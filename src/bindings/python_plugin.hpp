// Plugins written in Python (rm_abstract/plugin.py): the user's side as an rm::Backend that asks a
// description, and the worker's side as a worker::Service that calls the vendor's class.
//
// Invariant: every call into Python holds the GIL, takes no lock of ours meanwhile, and turns what
// Python raises into rm::Error before the GIL is given up.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "backend/backend.hpp"
#include "worker/server.hpp"

namespace rm::bindings {

/// `hooks` has the attributes name, version, build_id and path, and the functions score(),
/// devices(), fingerprint(device), query_support(device, text, nodes) and fits(device, artefact).
std::unique_ptr<Backend> make_python_backend(pybind11::object hooks);

/// `service` has the functions describe(), compile(...), load(...), make_states(...) and
/// copy_states(...) of worker/python_backend.py.
std::unique_ptr<worker::Service> make_python_service(pybind11::object service);

/// A Python exception as rm::Error: with the code and reason of rm_abstract.plugin.Failure and of
/// rm_abstract.Error, else RM_INTERNAL with the exception's type and text.
Error error_of(const pybind11::error_already_set& raised);

}  // namespace rm::bindings
