// Immutable bytes of C++ that Python sees by the buffer protocol and gives back without a copy: an
// artefact on its way from a worker to the cache to a worker.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "base/file.hpp"
#include "base/hash.hpp"

namespace rm::bindings {

struct SharedBytes {
  std::shared_ptr<const void> owner;
  ByteSpan bytes;
  std::shared_ptr<const Fd> file = {};  ///< that has the same bytes at `offset`; or nullptr
  uint64_t offset = 0;
};

/// What Python holds: a SharedBytes or a memoryview of all of one; nullptr for anything else.
inline const SharedBytes* shared_bytes_of(const pybind11::handle& value) {
  namespace py = pybind11;
  py::object base = py::reinterpret_borrow<py::object>(value);
  size_t size = 0;
  if (PyMemoryView_Check(value.ptr())) {
    const Py_buffer* view = PyMemoryView_GET_BUFFER(value.ptr());
    size = static_cast<size_t>(view->len);
    base = py::reinterpret_steal<py::object>(PyObject_GetAttrString(value.ptr(), "obj"));
    if (!base) throw py::error_already_set();
  }
  if (!py::isinstance<SharedBytes>(base)) return nullptr;
  const auto& found = base.cast<const SharedBytes&>();
  return size == 0 || size == found.bytes.size() ? &found : nullptr;
}

}  // namespace rm::bindings
