// rm::Error in Python: _core.CoreError with .code (an int of rm_code) and .reason ("RM105" or "").
#include <pybind11/pybind11.h>

#include "base/error.hpp"
#include "bindings/bind.hpp"
#include "exchange/core_error.hpp"

namespace rm::bindings {

namespace py = pybind11;

void bind_errors(py::module_& m) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> type;
  type.call_once_and_store_result([&]() -> py::object {
    return py::exception<Error>(m, "CoreError", PyExc_RuntimeError);
  });
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& e) {
      exchange::set_core_error(type.get_stored(), e);
    }
  });
}

}  // namespace rm::bindings
