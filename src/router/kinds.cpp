// Classification and comparison of values.  See the header for the invariant.
#include "router/kinds.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string_view>
#include <unordered_map>

namespace rm::router {
namespace {

constexpr int kMaxDepth = 8;  // tuples within tuples

// By the full name of a type made in C: a class written in Python has no module in its name.
constexpr std::array<std::string_view, 2> kPlainTypes = {"torch.device", "torch.Size"};
constexpr std::array<std::string_view, 7> kFixedTypes = {
    "torch.dtype",   "torch.layout", "torch.memory_format",  "torch.qscheme",
    "numpy.ufunc",   "ellipsis",     "NotImplementedType"};
constexpr std::array<std::string_view, 11> kScalarTypes = {
    "torch.finfo",     "torch.iinfo",   "re.Pattern",    "range",
    "slice",           "code",          "decimal.Decimal", "datetime.datetime",
    "datetime.date",   "datetime.time", "datetime.timedelta"};

template <std::size_t N>
bool contains(const std::array<std::string_view, N>& names, const char* name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

/// A type of an imported module, or null while that module is not imported.
PyTypeObject* imported_type(const char* module, const char* name) noexcept {
  PyObject* modules = PyImport_GetModuleDict();  // borrowed
  PyObject* found = PyDict_GetItemString(modules, module);
  PyObject* type = found != nullptr ? PyObject_GetAttrString(found, name) : nullptr;
  if (type == nullptr) PyErr_Clear();
  if (type != nullptr && !PyType_Check(type)) Py_CLEAR(type);
  return reinterpret_cast<PyTypeObject*>(type);  // kept for ever: modules keep it too
}

bool is_enum_member(PyObject* value) noexcept {
  static PyTypeObject* const base = imported_type("enum", "Enum");
  return base != nullptr && PyObject_TypeCheck(value, base);
}

bool is_numpy_scalar(PyObject* value) noexcept {
  static PyTypeObject* base = nullptr;
  if (base == nullptr) base = imported_type("numpy", "generic");
  return base != nullptr && PyObject_TypeCheck(value, base) &&
         std::strncmp(Py_TYPE(value)->tp_name, "numpy.", 6) == 0 &&
         std::strcmp(Py_TYPE(value)->tp_name, "numpy.void") != 0;
}

ValueKind kind_by_name(PyTypeObject* type) noexcept {
  if (contains(kPlainTypes, type->tp_name)) {
    return PyType_IsSubtype(type, &PyTuple_Type) ? ValueKind::kTuple : ValueKind::kPlain;
  }
  if (contains(kFixedTypes, type->tp_name)) return ValueKind::kFixed;
  return contains(kScalarTypes, type->tp_name) ? ValueKind::kScalar : ValueKind::kOther;
}

bool same_double(double a, double b) noexcept {
  return std::bit_cast<std::uint64_t>(a) == std::bit_cast<std::uint64_t>(b);
}

bool equal(PyObject* before, PyObject* now) noexcept {
  const int same = PyObject_RichCompareBool(before, now, Py_EQ);
  if (same < 0) PyErr_Clear();
  return same == 1;
}

}  // namespace

ValueKind kind_of(PyObject* value) noexcept {
  if (value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) ||
      PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) || PyBytes_CheckExact(value) ||
      PyComplex_CheckExact(value)) {
    return ValueKind::kPlain;
  }
  if (PyTuple_CheckExact(value)) return ValueKind::kTuple;
  if (PyList_CheckExact(value)) return ValueKind::kList;
  if (PyDict_CheckExact(value)) return ValueKind::kDict;
  if (PyAnySet_CheckExact(value)) return ValueKind::kSet;
  if (PyType_Check(value) || is_enum_member(value)) return ValueKind::kFixed;
  PyTypeObject* type = Py_TYPE(value);
  // A named tuple: a tuple with names for its items and no dictionary of its own.
  if (PyTuple_Check(value) && type->tp_dictoffset == 0) return ValueKind::kTuple;
  const ValueKind named = kind_by_name(type);
  if (named != ValueKind::kOther) return named;
  return is_numpy_scalar(value) ? ValueKind::kScalar : ValueKind::kOther;
}

const char* name_of(ValueKind kind) noexcept {
  constexpr std::array kNames = {"plain", "fixed", "scalar", "tuple",
                                   "list",  "dict",  "set",    "other"};
  return kNames[static_cast<std::size_t>(kind)];
}

bool same_value(PyObject* before, PyObject* now, int depth) noexcept {
  if (before == now) return true;
  if (before == nullptr || now == nullptr || Py_TYPE(before) != Py_TYPE(now)) return false;
  if (PyFloat_CheckExact(now)) {
    return same_double(PyFloat_AS_DOUBLE(before), PyFloat_AS_DOUBLE(now));
  }
  if (PyComplex_CheckExact(now)) {
    const Py_complex a = PyComplex_AsCComplex(before), b = PyComplex_AsCComplex(now);
    return same_double(a.real, b.real) && same_double(a.imag, b.imag);
  }
  if (PyTuple_Check(now)) {
    const Py_ssize_t size = PyTuple_GET_SIZE(now);
    bool same = kind_of(now) == ValueKind::kTuple && depth < kMaxDepth &&
                PyTuple_GET_SIZE(before) == size;
    for (Py_ssize_t i = 0; same && i < size; ++i) {
      same = same_value(PyTuple_GET_ITEM(before, i), PyTuple_GET_ITEM(now, i), depth + 1);
    }
    return same;
  }
  return kind_of(now) == ValueKind::kPlain && equal(before, now);
}

}  // namespace rm::router
