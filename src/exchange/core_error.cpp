#include "exchange/core_error.hpp"

namespace rm::exchange {

namespace py = pybind11;

py::str readable(std::string_view text) {
  PyObject* made =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(made);
}

void set_core_error(py::handle type, const Error& error) {
  py::object value = type(readable(error.what()));
  value.attr("code") = static_cast<int>(error.code());
  value.attr("reason") = readable(error.reason());
  PyErr_SetObject(type.ptr(), value.ptr());
}

}  // namespace rm::exchange
