// The part of the guard that watches what lies beside a module tree: containers and objects held in
// attributes, class attributes, globals and captured variables.  Values are compared as they were
// at the snapshot: plain ones by value, tuples item by item, everything else by identity.
#include <pybind11/pybind11.h>

#include "bindings/router_guard.hpp"

namespace py = pybind11;

namespace rm::bindings {
namespace {

constexpr int kMaxDepth = 8;  // tuples within tuples

bool same_value(PyObject* before, PyObject* now, int depth) {
  if (before == now) return true;
  if (before == nullptr || now == nullptr || Py_TYPE(before) != Py_TYPE(now)) return false;
  if (PyTuple_CheckExact(now)) {
    if (depth >= kMaxDepth || PyTuple_GET_SIZE(before) != PyTuple_GET_SIZE(now)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(now); ++i) {
      if (!same_value(PyTuple_GET_ITEM(before, i), PyTuple_GET_ITEM(now, i), depth + 1)) {
        return false;
      }
    }
    return true;
  }
  const bool plain = PyLong_CheckExact(now) || PyFloat_CheckExact(now) ||
                     PyUnicode_CheckExact(now) || PyBytes_CheckExact(now) ||
                     PyComplex_CheckExact(now);
  if (!plain) return false;
  const int equal = PyObject_RichCompareBool(before, now, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

/// A list, or another sequence that is not a tuple.
bool same_items(const std::vector<PyRef>& before, PyObject* now) {
  if (PyList_CheckExact(now)) {  // mostly the same objects: a look at each, no reference taken
    const auto count = static_cast<std::size_t>(PyList_GET_SIZE(now));
    bool same = count == before.size();
    for (std::size_t i = 0; same && i < count; ++i) {
      PyObject* item = PyList_GET_ITEM(now, static_cast<Py_ssize_t>(i));
      same = item == before[i].get() || same_value(before[i].get(), item, 0);
    }
    return same;
  }
  const Py_ssize_t size = PySequence_Size(now);
  if (size < 0) PyErr_Clear();
  if (size != static_cast<Py_ssize_t>(before.size())) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    const PyRef item = PyRef::steal(PySequence_GetItem(now, i));
    if (!item) PyErr_Clear();
    if (!same_value(before[static_cast<std::size_t>(i)].get(), item.get(), 0)) return false;
  }
  return true;
}

std::string text_of(PyObject* value) {
  const char* text = PyUnicode_Check(value) ? PyUnicode_AsUTF8(value) : nullptr;
  if (text == nullptr) PyErr_Clear();
  return text != nullptr ? text : "?";
}

}  // namespace

void Guard::add_entries(PyObject* dict, bool is_root, PyObject* names, std::string place) {
  Dict record;
  if (!is_root) record.object = PyRef::borrow(dict);
  record.kind = names == Py_None ? Kind::kWhole : Kind::kNamed;
  record.place = std::move(place);
  if (names == Py_None) {
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
      record.items.push_back({PyRef::borrow(key), PyRef::borrow(value)});
    }
  } else {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
      PyObject* key = PyTuple_GET_ITEM(names, i);
      PyObject* value = PyDict_GetItem(dict, key);
      if (value != nullptr) record.items.push_back({PyRef::borrow(key), PyRef::borrow(value)});
    }
  }
  dicts_.push_back(std::move(record));
}

void Guard::add_held(PyObject* object, std::string place) {
  Held record;
  record.object = PyRef::borrow(object);
  record.place = std::move(place);
  if (PyCell_Check(object)) {
    record.items.push_back(PyRef::borrow(PyCell_GET(object)));
  } else {
    for (const py::handle item : py::reinterpret_borrow<py::sequence>(object)) {
      record.items.push_back(PyRef::borrow(item.ptr()));
    }
  }
  held_.push_back(std::move(record));
}

Reason Guard::add_around(PyObject* root, PyObject* around, const TorchFacts& facts) {
  if (around == Py_None) return Reason::kNone;
  const auto groups = py::reinterpret_borrow<py::tuple>(around);
  const auto root_dict = py::reinterpret_borrow<py::object>(root).attr("__dict__");
  for (const py::handle row : groups[0].cast<py::list>()) {
    const auto [dict, names, place] = row.cast<std::tuple<py::object, py::object, std::string>>();
    const bool is_root = dict.is_none();
    add_entries(is_root ? root_dict.ptr() : dict.ptr(), is_root, names.ptr(), place);
  }
  for (const int group : {1, 2}) {
    for (const py::handle row : groups[group].cast<py::list>()) {
      const auto [object, place] = row.cast<std::tuple<py::object, std::string>>();
      add_held(object.ptr(), place);
    }
  }
  for (const py::handle row : groups[3].cast<py::list>()) {
    const auto [kind, names] = row.cast<std::tuple<py::object, py::object>>();
    auto* type = reinterpret_cast<PyTypeObject*>(kind.ptr());
    add_entries(type->tp_dict, false, names.ptr(), type->tp_name);
  }
  for (const py::handle row : groups[4].cast<py::list>()) {
    const auto [tensor, place] = row.cast<std::tuple<py::object, std::string>>();
    const Reason bad = add_weight(nullptr, tensor.ptr(), 0, place.c_str(), facts);
    if (bad != Reason::kNone) return bad;
  }
  return Reason::kNone;
}

bool Guard::check_entries(const Dict& dict, PyObject* object) {
  if (dict.kind == Kind::kWhole &&
      PyDict_GET_SIZE(object) != static_cast<Py_ssize_t>(dict.items.size())) {
    detail_ = dict.place + ": entries were added or removed";
    return false;
  }
  for (const Item& item : dict.items) {
    if (same_value(item.value.get(), PyDict_GetItem(object, item.key.get()), 0)) continue;
    detail_ = (dict.place.empty() ? "" : dict.place + ".") + text_of(item.key.get()) + ": changed";
    return false;
  }
  return true;
}

bool Guard::check_held(const Held& held) {
  PyObject* object = held.object.get();
  bool same = true;
  if (PyCell_Check(object)) {
    same = same_value(held.items[0].get(), PyCell_GET(object), 0);
  } else {
    same = same_items(held.items, object);
  }
  if (!same) detail_ = held.place + ": changed";
  return same;
}

}  // namespace rm::bindings
