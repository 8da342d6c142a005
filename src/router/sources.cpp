// The part of the guard that watches what lies beside a module tree: containers and objects held in
// attributes, classes, functions, globals and captured variables.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <utility>

#include "router/guard.hpp"
#include "router/kinds.hpp"

namespace py = pybind11;

// Private before 3.13 only by its name; the public ways take a string and search every time.
extern "C" PyAPI_FUNC(PyObject*) _PyType_Lookup(PyTypeObject*, PyObject*);

namespace rm::router {
namespace {

/// A number that CPython changes with every change of a class or of one of its bases; 0: none now.
unsigned version_of(PyTypeObject* type) {
#if PY_VERSION_HEX < 0x030C0000
  if (!PyType_HasFeature(type, Py_TPFLAGS_VALID_VERSION_TAG)) return 0;
#endif
  return type->tp_version_tag;
}

/// What a class is called: its own, which no version counts. Null: made in C, it stays as it is.
PyObject* name_of(PyTypeObject* type) noexcept {
  if (!PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE)) return nullptr;
  return reinterpret_cast<PyHeapTypeObject*>(type)->ht_name;
}

/// A number that Python raises with every class that is registered with an abstract one.
std::uint64_t registrations() noexcept {
  static PyObject* const token = [] {
    const PyRef module = PyRef::steal(PyImport_ImportModule("_abc"));
    return module ? PyObject_GetAttrString(module.get(), "get_cache_token") : nullptr;
  }();
  const PyRef now = PyRef::steal(token != nullptr ? PyObject_CallNoArgs(token) : nullptr);
  const std::uint64_t number = now ? PyLong_AsUnsignedLongLong(now.get()) : UINT64_MAX;
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  return number;
}

/// A list, or another sequence that is not a tuple.
bool same_items(const std::vector<PyRef>& before, PyObject* now) {
  if (PyList_CheckExact(now)) {  // mostly the same objects: a look at each, no reference taken
    const auto count = static_cast<std::size_t>(PyList_GET_SIZE(now));
    bool same = count == before.size();
    for (std::size_t i = 0; same && i < count; ++i) {
      PyObject* item = PyList_GET_ITEM(now, static_cast<Py_ssize_t>(i));
      same = item == before[i].get() || same_value(before[i].get(), item);
    }
    return same;
  }
  const Py_ssize_t size = PySequence_Size(now);
  if (size < 0) PyErr_Clear();
  if (size != static_cast<Py_ssize_t>(before.size())) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    const PyRef item = PyRef::steal(PySequence_GetItem(now, i));
    if (!item) PyErr_Clear();
    if (!same_value(before[static_cast<std::size_t>(i)].get(), item.get())) return false;
  }
  return true;
}

std::string text_of(PyObject* value) {
  const char* text = PyUnicode_Check(value) ? PyUnicode_AsUTF8(value) : nullptr;
  if (text == nullptr) PyErr_Clear();
  return text != nullptr ? text : "?";
}

/// Shape, type and bytes of a C-contiguous array; empty when it does not show them.
std::string content_of(PyObject* array) {
  Py_buffer view;
  if (PyObject_GetBuffer(array, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return {};
  }
  std::string content = view.format != nullptr ? view.format : "B";
  content.push_back('\0');
  content.append(reinterpret_cast<const char*>(view.shape),
                 static_cast<std::size_t>(view.ndim) * sizeof(Py_ssize_t));
  content.append(static_cast<const char*>(view.buf), static_cast<std::size_t>(view.len));
  PyBuffer_Release(&view);
  return content;
}

/// An ordered dictionary that was put in another order keeps its version.
bool same_order(const std::vector<PyRef>& before, PyObject* dict) {
  const PyRef keys = PyRef::steal(PySequence_List(dict));
  if (!keys) PyErr_Clear();
  return keys && same_items(before, keys.get());
}

/// A slot of an object: read by C's own descriptor, past any __getattribute__ of the user's.
PyRef slot_of(PyObject* object, PyObject* name) {
  PyObject* value = PyObject_GenericGetAttr(object, name);
  if (value == nullptr) PyErr_Clear();  // never filled
  return PyRef::steal(value);
}

}  // namespace

void Guard::set_names(PyObject* names, bool every) {
  names_ = PyRef::borrow(names);
  every_name_ = every;
  for (const py::handle name : py::reinterpret_borrow<py::iterable>(names)) {
    names_list_.push_back(PyRef::borrow(name.ptr()));
  }
}

void Guard::add_entries(PyObject* dict, bool is_root, PyObject* names, std::string place) {
  Dict record;
  if (!is_root) record.object = PyRef::borrow(dict);
  record.kind = names == Py_None   ? Kind::kWhole
                : names == Py_True ? Kind::kReached
                                   : Kind::kNamed;
  record.place = std::move(place);
  if (record.kind == Kind::kNamed) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
      PyObject* key = PyTuple_GET_ITEM(names, i);
      record.items.push_back({PyRef::borrow(key), PyRef::borrow(PyDict_GetItem(dict, key))});
    }
  } else {
    PyObject *key = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(dict, &position, &key, &value)) {
      if (record.kind == Kind::kWhole || counts(record.kind, key)) {
        record.items.push_back({PyRef::borrow(key), PyRef::borrow(value)});
      }
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
  } else if (PyAnySet_Check(object)) {
    record.items.push_back(PyRef::steal(PyFrozenSet_New(object)));
    if (!record.items[0]) throw py::error_already_set();
  } else {  // of an ordered dictionary, its keys
    for (const py::handle item : py::reinterpret_borrow<py::iterable>(object)) {
      record.items.push_back(PyRef::borrow(item.ptr()));
    }
  }
  held_.push_back(std::move(record));
}

void Guard::add_object(PyObject* object, PyObject* slots, std::string place) {
  Object record;
  record.object = PyRef::borrow(object);
  record.type = PyRef::borrow(reinterpret_cast<PyObject*>(Py_TYPE(object)));
  record.attributes = Attributes::of(object);
  record.place = std::move(place);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(slots); ++i) {
    PyObject* name = PyTuple_GET_ITEM(slots, i);
    record.slots.push_back({PyRef::borrow(name), slot_of(object, name)});
  }
  objects_.push_back(std::move(record));
}

void Guard::add_class(PyObject* type) {
  Class record;
  record.type = PyRef::borrow(type);
  record.found.reserve(names_list_.size());
  auto* kind = reinterpret_cast<PyTypeObject*>(type);
  for (const PyRef& name : names_list_) {
    record.found.push_back(PyRef::borrow(_PyType_Lookup(kind, name.get())));
  }
  record.order = PyRef::borrow(kind->tp_mro);
  record.name = PyRef::borrow(name_of(kind));
  record.version = version_of(kind);
  classes_.push_back(std::move(record));
}

void Guard::add_function(PyObject* function) {
  if (!PyFunction_Check(function)) throw py::type_error("[guard] expected a Python function");
  auto* fields = reinterpret_cast<PyFunctionObject*>(function);
  functions_.push_back({PyRef::borrow(function), PyRef::borrow(PyFunction_GET_CODE(function)),
                        PyRef::borrow(PyFunction_GET_DEFAULTS(function)),
                        PyRef::borrow(PyFunction_GET_KW_DEFAULTS(function)),
                        PyRef::borrow(fields->func_name), PyRef::borrow(fields->func_doc)});
}

Reason Guard::add_sources(PyObject* root, PyObject* sources, const TorchFacts& facts) {
  if (sources == Py_None) return Reason::kNone;
  const auto fields = py::reinterpret_borrow<py::tuple>(sources);
  const auto root_dict = py::reinterpret_borrow<py::object>(root).attr("__dict__");
  const auto rows = [&](std::size_t at) { return fields[at].cast<py::list>(); };
  for (const py::handle row : rows(2)) {
    const auto [dict, names, place] = row.cast<std::tuple<py::object, py::object, std::string>>();
    const bool is_root = dict.is_none();
    add_entries(is_root ? root_dict.ptr() : dict.ptr(), is_root, names.ptr(), place);
  }
  for (const py::handle row : rows(3)) {
    const auto [object, place] = row.cast<std::tuple<py::object, std::string>>();
    add_held(object.ptr(), place);
  }
  for (const py::handle row : rows(4)) {
    const auto [object, slots, place] = row.cast<std::tuple<py::object, py::tuple, std::string>>();
    add_object(object.ptr(), slots.ptr(), place);
  }
  for (const py::handle row : rows(5)) {
    const auto [array, place] = row.cast<std::tuple<py::object, std::string>>();
    std::string content = content_of(array.ptr());
    if (content.empty()) {
      detail_ = place + ": an array whose memory cannot be compared";
      return Reason::kArgument;
    }
    arrays_.push_back({PyRef::borrow(array.ptr()), std::move(content), place});
  }
  for (const py::handle type : rows(6)) add_class(type.ptr());
  for (const py::handle function : rows(7)) add_function(function.ptr());
  for (const py::handle row : rows(8)) {
    const auto [tensor, place] = row.cast<std::tuple<py::object, std::string>>();
    const Reason bad = add_weight(nullptr, tensor.ptr(), 0, place.c_str(), facts);
    if (bad != Reason::kNone) return bad;
  }
  const auto [of, kinds] = fields[10].cast<std::pair<py::object, py::tuple>>();
  if (!kinds.empty()) {
    registered_.token = registrations();
    registered_.found = PyRef::borrow(of(kinds).ptr());
    registered_.of = PyRef::borrow(of.ptr());
    registered_.kinds = PyRef::borrow(kinds.ptr());
  }
  return Reason::kNone;
}

/// Whether an entry holds a list with the items of the one that it held, which is watched instead.
/// The old one stays watched while something else may hold it.
bool Guard::taken_over(Item& item, PyObject* now) {
  PyObject* before = item.value.get();
  if (!lists_by_content_ || before == nullptr || now == nullptr || !PyList_CheckExact(before) ||
      !PyList_CheckExact(now)) {
    return false;
  }
  const auto record_of = [this](PyObject* list) {
    return std::find_if(held_.begin(), held_.end(),
                        [list](const Held& held) { return held.object.get() == list; });
  };
  const auto old = record_of(before);
  if (old == held_.end() || !check_held(*old) || !same_items(old->items, now)) return false;
  const bool only_ours = Py_REFCNT(before) == 2;  // the entry's and the record's
  const bool watched = record_of(now) != held_.end();
  if (only_ours && watched) {
    held_.erase(old);
  } else if (only_ours) {
    old->object = PyRef::borrow(now);
  } else if (!watched) {
    Held record;
    record.object = PyRef::borrow(now);
    record.place = old->place;
    for (const PyRef& kept : old->items) record.items.push_back(PyRef::borrow(kept.get()));
    held_.push_back(std::move(record));
  }
  item.value = PyRef::borrow(now);
  return true;
}

bool Guard::check_entries(Dict& dict, PyObject* object) {
  const std::string prefix = dict.place.empty() ? "" : dict.place + ".";
  if (dict.kind == Kind::kWhole &&
      PyDict_GET_SIZE(object) != static_cast<Py_ssize_t>(dict.items.size())) {
    detail_ = dict.place + ": entries were added or removed";
    return false;
  }
  for (Item& item : dict.items) {
    PyObject* now = PyDict_GetItem(object, item.key.get());
    if (same_value(item.value.get(), now) || taken_over(item, now)) continue;
    detail_ = prefix + text_of(item.key.get()) + ": changed";
    return false;
  }
  if (!in_order(dict, object)) {
    detail_ = dict.place + ": in another order";
    return false;
  }
  if (dict.kind != Kind::kReached) return true;
  PyObject* added = added_entry(dict, object);
  if (added != nullptr) detail_ = prefix + text_of(added) + ": added";
  return added == nullptr;
}

bool Guard::check_held(const Held& held) {
  PyObject* object = held.object.get();
  bool same = true;
  if (PyCell_Check(object)) {
    same = same_value(held.items[0].get(), PyCell_GET(object));
  } else if (PyAnySet_Check(object)) {  // of plain and fixed values only: C compares them
    same = PyObject_RichCompareBool(object, held.items[0].get(), Py_EQ) == 1;
    if (!same) PyErr_Clear();
  } else if (PyDict_Check(object)) {
    same = same_order(held.items, object);
  } else {
    same = same_items(held.items, object);
  }
  if (!same) detail_ = held.place + ": changed";
  return same;
}

bool Guard::check_array(const Array& array) {
  if (content_of(array.object.get()) == array.content) return true;
  detail_ = array.place + ": changed";
  return false;
}

bool Guard::check_object(const Object& known) {
  PyObject* object = known.object.get();
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != known.type.get()) {
    detail_ = known.place + ": another class";
    return false;
  }
  if (known.attributes.replaced()) {
    detail_ = known.place + ": another __dict__";
    return false;
  }
  for (const Item& slot : known.slots) {
    if (same_value(slot.value.get(), slot_of(object, slot.key.get()).get())) continue;
    detail_ = known.place + "." + text_of(slot.key.get()) + ": changed";
    return false;
  }
  return true;
}

bool Guard::check_class(Class& known) {
  auto* type = reinterpret_cast<PyTypeObject*>(known.type.get());
  if (name_of(type) != known.name.get()) {
    detail_ = std::string(type->tp_name) + ": another name";
    return false;
  }
  const unsigned version = version_of(type);
  if (version != 0 && version == known.version) return true;
  if (type->tp_mro != known.order.get()) {
    detail_ = std::string(type->tp_name) + ": other base classes";
    return false;
  }
  for (std::size_t i = 0; i < names_list_.size(); ++i) {
    PyObject* name = names_list_[i].get();
    if (_PyType_Lookup(type, name) == known.found[i].get()) continue;
    detail_ = std::string(type->tp_name) + "." + text_of(name) + ": replaced on the class";
    return false;
  }
  known.version = version_of(type);  // the look-ups gave it a new one
  return true;
}

bool Guard::check_function(const Function& known) {
  PyObject* function = known.function.get();
  if (PyFunction_GET_CODE(function) == known.code.get() &&
      PyFunction_GET_DEFAULTS(function) == known.defaults.get() &&
      PyFunction_GET_KW_DEFAULTS(function) == known.keyword_defaults.get() &&
      reinterpret_cast<PyFunctionObject*>(function)->func_name == known.name.get() &&
      reinterpret_cast<PyFunctionObject*>(function)->func_doc == known.doc.get()) {
    return true;
  }
  const char* name =
      PyUnicode_AsUTF8(reinterpret_cast<PyFunctionObject*>(function)->func_qualname);
  if (name == nullptr) PyErr_Clear();
  detail_ = std::string(name != nullptr ? name : "a function") + ": its code or defaults changed";
  return false;
}

/// The token moves with every import that registers classes: it alone would say too much.
bool Guard::check_registered() {
  if (!registered_.kinds) return true;
  const std::uint64_t token = registrations();
  if (token == registered_.token && token != UINT64_MAX) return true;
  const PyRef now =
      PyRef::steal(PyObject_CallOneArg(registered_.of.get(), registered_.kinds.get()));
  const bool same =
      now && PyObject_RichCompareBool(now.get(), registered_.found.get(), Py_EQ) == 1;
  if (PyErr_Occurred() != nullptr) PyErr_Clear();
  if (same) registered_.token = token;
  if (!same) detail_ = "a class was registered with an abstract one";
  return same;
}

/// Everything beside the tree that has no version of its own in a dictionary.
bool Guard::check_beside() {
  if (!check_registered()) return false;
  for (Class& known : classes_) {
    if (!check_class(known)) return false;
  }
  for (const Function& known : functions_) {
    if (!check_function(known)) return false;
  }
  for (const Object& known : objects_) {
    if (!check_object(known)) return false;
  }
  const auto same_held = [this](const Held& held) { return check_held(held); };
  const auto same_array = [this](const Array& array) { return check_array(array); };
  return std::all_of(held_.begin(), held_.end(), same_held) &&
         std::all_of(arrays_.begin(), arrays_.end(), same_array);
}

}  // namespace rm::router
