// rm::Error in Python: _core.CoreError with .code (an int of rm_code) and .reason ("RM105" or "").
#include <pybind11/pybind11.h>

#include "base/error.hpp"
#include "bindings/bind.hpp"

namespace rm::bindings {

namespace py = pybind11;

py::str readable(std::string_view text) {
  PyObject* made =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(made);
}

void bind_errors(py::module_& m) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> type;
  type.call_once_and_store_result([&]() -> py::object {
    return py::exception<Error>(m, "CoreError", PyExc_RuntimeError);
  });
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const Error& e) {
      const py::object& error_type = type.get_stored();
      py::object value = error_type(readable(e.what()));
      value.attr("code") = static_cast<int>(e.code());
      value.attr("reason") = readable(e.reason());
      PyErr_SetObject(error_type.ptr(), value.ptr());
    }
  });
}

}  // namespace rm::bindings
