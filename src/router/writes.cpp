// What WriteTracker remembers, and the attribute `data` that nn.Parameter gets.
#include "router/writes.hpp"

#include <utility>

#include "router/torch.hpp"

namespace py = pybind11;

namespace rm::router {

WriteTracker::~WriteTracker() {
  for (auto& [tensor, row] : watched_) {
    for (PyObject* alias : row.aliases) Py_DECREF(alias);
    if (row.owned) Py_DECREF(tensor);
  }
}

void WriteTracker::watch(PyObject* tensor) {
  Row& row = watched_[tensor];
  ++row.guards;
  if (!row.owned) return;
  row.owned = false;
  std::erase(orphans_, tensor);
  Py_DECREF(tensor);  // the caller holds it
}

void WriteTracker::unwatch(PyObject* tensor) noexcept {
  const auto found = watched_.find(tensor);
  if (found == watched_.end() || --found->second.guards > 0) return;
  drop_dead(found->second);
  if (found->second.aliases.empty()) {
    watched_.erase(found);
  } else {  // what is held stays known: the next guard of the same weights must hear of it
    found->second.owned = true;
    Py_INCREF(tensor);
    orphans_.push_back(tensor);
  }
  if (!orphans_.empty()) drop_orphans();
}

void WriteTracker::drop_orphans() noexcept {
  std::vector<PyObject*> gone;
  std::erase_if(orphans_, [&](PyObject* tensor) {
    const auto row = watched_.find(tensor);
    drop_dead(row->second);
    if (!row->second.aliases.empty()) return false;
    watched_.erase(row);
    gone.push_back(tensor);
    return true;
  });
  for (PyObject* tensor : gone) Py_DECREF(tensor);  // last: this may run anything
}

void WriteTracker::note(PyObject* tensor, PyObject* alias) noexcept {
  const auto found = watched_.find(tensor);
  if (found == watched_.end()) return;
  found->second.at = ++clock_;
  if (alias == nullptr) return;
  drop_dead(found->second);
  if (PyObject* weak = PyWeakref_NewRef(alias, nullptr)) {
    found->second.aliases.push_back(weak);
  } else {
    PyErr_Clear();
  }
}

std::uint64_t WriteTracker::last_write(PyObject* tensor) const noexcept {
  const auto found = watched_.find(tensor);
  return found == watched_.end() ? 0 : found->second.at;
}

bool WriteTracker::has_alias(PyObject* tensor) noexcept {
  const auto found = watched_.find(tensor);
  if (found == watched_.end()) return false;
  drop_dead(found->second);
  return !found->second.aliases.empty();
}

void WriteTracker::drop_dead(Row& row) noexcept {
  std::erase_if(row.aliases, [](PyObject* weak) {
    if (referent(weak)) return false;
    Py_DECREF(weak);
    return true;
  });
}

namespace {

/// A data descriptor around torch's own: the same tensors come and go, and reads are noted.
struct DataAttribute {
  PyObject_HEAD PyObject* original;
  std::shared_ptr<WriteTracker>* writes;
};

PyObject* data_get(PyObject* self, PyObject* tensor, PyObject* type) {
  auto& attribute = *reinterpret_cast<DataAttribute*>(self);
  descrgetfunc get = Py_TYPE(attribute.original)->tp_descr_get;
  PyObject* alias = get(attribute.original, tensor, type);
  if (tensor == nullptr || tensor == Py_None) {  // asked of the class
    Py_XDECREF(alias);
    Py_INCREF(self);
    return self;
  }
  if (alias != nullptr) (*attribute.writes)->note(tensor, alias);
  return alias;
}

int data_set(PyObject* self, PyObject* tensor, PyObject* value) {
  PyObject* original = reinterpret_cast<DataAttribute*>(self)->original;
  return Py_TYPE(original)->tp_descr_set(original, tensor, value);
}

PyObject* data_doc(PyObject* self, void*) {
  return PyObject_GetAttrString(reinterpret_cast<DataAttribute*>(self)->original, "__doc__");
}

PyObject* data_name(PyObject*, void*) { return PyUnicode_FromString("data"); }

void data_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  auto& attribute = *reinterpret_cast<DataAttribute*>(self);
  Py_XDECREF(attribute.original);
  delete attribute.writes;
  PyObject_Free(self);
  Py_DECREF(type);
}

PyGetSetDef kAttributes[] = {{"__doc__", data_doc, nullptr, nullptr, nullptr},
                             {"__name__", data_name, nullptr, nullptr, nullptr},
                             {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot kSlots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(data_dealloc)},
                        {Py_tp_descr_get, reinterpret_cast<void*>(data_get)},
                        {Py_tp_descr_set, reinterpret_cast<void*>(data_set)},
                        {Py_tp_getset, kAttributes},
                        {0, nullptr}};

PyType_Spec kSpec = {"rm_abstract._core.router.DataAttribute", sizeof(DataAttribute), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, kSlots};

py::object make_data_attribute(const py::object& type, std::shared_ptr<WriteTracker> writes,
                               const py::object& original) {
  PyTypeObject* kind = Py_TYPE(original.ptr());
  if (kind->tp_descr_get == nullptr || kind->tp_descr_set == nullptr) {
    throw py::type_error("[router] expected a data descriptor");
  }
  auto* made = PyObject_New(DataAttribute, reinterpret_cast<PyTypeObject*>(type.ptr()));
  if (made == nullptr) throw py::error_already_set();
  made->original = original.inc_ref().ptr();
  made->writes = new std::shared_ptr<WriteTracker>(std::move(writes));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(made));
}

}  // namespace

void bind_write_tracker(py::module_& router) {
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&kSpec));
  if (!type) throw py::error_already_set();
  py::class_<WriteTracker, std::shared_ptr<WriteTracker>>(router, "WriteTracker")
      .def(py::init<>())
      .def_property_readonly("clock", [](const WriteTracker& writes) { return writes.clock(); },
                             "Moves with every write that was heard of.")
      .def("note",
           [](WriteTracker& writes, const py::list& groups) {
             for (const py::handle group : groups) {
               if (!PyDict_Check(group.ptr())) continue;
               PyObject* tensors = PyDict_GetItemString(group.ptr(), "params");
               if (tensors == nullptr || !PyList_Check(tensors)) continue;
               for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
                 writes.note(PyList_GET_ITEM(tensors, i), nullptr);
               }
             }
           })
      .def("data_attribute",
           [type](const std::shared_ptr<WriteTracker>& writes, const py::object& original) {
             return make_data_attribute(type, writes, original);
           });
}

}  // namespace rm::router
