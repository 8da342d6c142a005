// Snapshot and comparison of a module tree.  See the header for the invariant.
#include "router/guard.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <unordered_set>

#include "router/kinds.hpp"

namespace py = pybind11;

namespace rm::router {
namespace {

// Up to 3.13 each dict carries a number that no two states of any dict share.  Later versions have
// none: then every dict counts as possibly changed and is compared.  3.13 keeps attribute values of
// an instance outside its dict, so an instance's __dict__ is always compared there.
std::uint64_t tag_of(PyObject* dict) {
#if PY_VERSION_HEX < 0x030E0000
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#pragma GCC diagnostic pop
#else
  (void)dict;
  return 0;
#endif
}

constexpr bool tags_usable(bool instance_dict) {
  if (PY_VERSION_HEX >= 0x030E0000) return false;
  return !instance_dict || PY_VERSION_HEX < 0x030D0000;
}

constexpr std::size_t kCallsForAll = 64;  // by then the content of every weight was compared

constexpr std::array kTensorHolders = {"_parameters", "_buffers", "_modules"};
constexpr std::array kHookHolders = {"_forward_hooks", "_forward_pre_hooks"};
constexpr std::array kRegistries = {"_parameters",        "_buffers",        "_modules",
                                    "_forward_hooks",     "_forward_pre_hooks",
                                    "_backward_hooks",    "_backward_pre_hooks"};

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }

/// nn.Module's own dictionaries: whoever replaces one replaces what the snapshot watches.
bool is_registry(PyObject* key) {
  for (const char* name : kRegistries) {
    if (PyUnicode_Check(key) && PyUnicode_CompareWithASCIIString(key, name) == 0) return true;
  }
  return false;
}

/// transformers leaves its output-capture hooks on submodules; without an active collector (the
/// router checks that variable itself) they return at once.
bool is_capture_hook(PyObject* hook) {
  static PyObject* const module_name = interned("__module__");
  if (!PyFunction_Check(hook)) return false;
  PyObject* name = PyObject_GetAttr(hook, module_name);
  if (name == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool ours = PyUnicode_Check(name) && PyUnicode_CompareWithASCIIString(
                                                 name, "transformers.utils.output_capturing") == 0;
  Py_DECREF(name);
  return ours;
}

bool only_inactive_hooks(PyObject* hooks) {
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(hooks, &position, &key, &value)) {
    if (!is_capture_hook(value)) return false;
  }
  return true;
}

}  // namespace

void Guard::clear() {
  if (writes_) {
    for (const Weight& weight : weights_) writes_->unwatch(weight.tensor.get());
  }
  writes_.reset();
  aliased_ = SIZE_MAX;
  modules_.clear();
  classes_.clear();
  dicts_.clear();
  held_.clear();
  arrays_.clear();
  objects_.clear();
  functions_.clear();
  registered_ = {};
  names_ = {};
  names_list_.clear();
  every_name_ = true;
  asks_ = {};
  weights_.clear();
  contents_.clear();
  dims_.clear();
  grad_hint_ = 0;
  taken_ = false;
}

std::string Guard::path_of(std::uint32_t module, PyObject* key) const {
  const char* name = key != nullptr ? PyUnicode_AsUTF8(key) : nullptr;
  if (name == nullptr) PyErr_Clear();
  const std::string& path = modules_[module].path;
  if (name == nullptr) return path;
  return path.empty() ? name : path + "." + name;
}

/// Whether an entry of an object's dictionary is watched.
bool Guard::counts(Kind kind, PyObject* key) const noexcept {
  static PyObject* const training = interned("training");
  static PyObject* const forward = interned("forward");
  static PyObject* const slot = interned("_compiled_call_impl");
  if (kind == Kind::kAttributes) {
    if (key == training) return trains_ || asks_.training;
    if (key == forward || key == slot) return false;  // judged by value, or ours
    if (is_registry(key)) return true;
  }
  if (kind == Kind::kExact || every_name_) return true;
  const int found = PySet_Contains(names_.get(), key);
  if (found < 0) PyErr_Clear();  // a key that cannot be hashed is in no dictionary
  return found == 1;
}

std::string Guard::path_of(const Weight& weight) const {
  return weight.place.empty() ? path_of(weight.module, weight.key.get()) : weight.place;
}

void Guard::add_dict(PyObject* dict, bool is_root, Kind kind, std::uint32_t module) {
  Dict record;
  if (!is_root) record.object = PyRef::borrow(dict);
  record.kind = kind;
  record.module = module;
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (kind != Kind::kHooks && PyDict_Next(dict, &position, &key, &value)) {
    if (counts(kind, key)) record.items.push_back({PyRef::borrow(key), PyRef::borrow(value)});
  }
  dicts_.push_back(std::move(record));
}

/// CPython keeps the pointer to an object's dictionary in the object, in one place for its life.
Guard::Attributes Guard::Attributes::of(PyObject* object) {
  Attributes found;
  if (_PyObject_GetDictPtr(object) == nullptr) return found;
  PyObject* dict = PyObject_GenericGetDict(object, nullptr);  // makes one of values kept inline
  if (dict == nullptr) {
    PyErr_Clear();
    return found;
  }
  found.dict = PyRef::steal(dict);
  PyObject** const place = _PyObject_GetDictPtr(object);
  found.place = *place == dict ? place : nullptr;
  return found;
}

void Guard::add_module(PyObject* module, bool is_root, const std::string& path) {
  Module record;
  if (!is_root) record.object = PyRef::borrow(module);
  if (!is_root) record.attributes = Attributes::of(module);
  record.type = Py_TYPE(module);
  record.path = path;
  modules_.push_back(std::move(record));
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(module));
  for (const Class& known : classes_) {
    if (known.type.get() == type) return;
  }
  add_class(type);
}

Reason Guard::add_weights(PyObject* dict, std::uint32_t module, const TorchFacts& facts) {
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (!facts.is_any_tensor(value)) continue;
    if (Reason bad = add_weight(key, value, module, "", facts); bad != Reason::kNone) return bad;
  }
  return Reason::kNone;
}

/// Bytes from a tensor's first element to behind its last one.
static std::size_t span_of(const DLTensor& view) noexcept {
  std::int64_t elements = 1;
  for (std::int32_t i = 0; i < view.ndim; ++i) {
    if (view.shape[i] == 0) return 0;
    elements += (view.shape[i] - 1) * view.strides[i];
  }
  return static_cast<std::size_t>(elements) * ((view.dtype.bits * view.dtype.lanes + 7) / 8);
}

Reason Guard::add_weight(PyObject* key, PyObject* value, std::uint32_t module, const char* place,
                         const TorchFacts& facts) {
  Weight weight;
  weight.tensor = PyRef::borrow(value);
  if (key != nullptr) weight.key = PyRef::borrow(key);
  weight.module = module;
  weight.place = place;
  const std::string where = weight.place.empty() ? path_of(module, key) : weight.place;
  DLTensor view{};
  if (!facts.is_plain_tensor(value) || !facts.view(value, &view) || facts.is_lazy_view(value)) {
    detail_ = where + ": not a plain dense tensor";
    return Reason::kModule;
  }
  weight.wants_gradient = facts.requires_grad(value);
  if (asks_.gradients && !trains_ && facts.has_gradient(value)) {
    detail_ = where + ".grad: is not watched";
    return Reason::kModule;
  }
  weight.version = facts.version(value);
  if (weight.version < 0) {
    detail_ = where + ": an inference tensor, changes cannot be noticed";
    return Reason::kModule;
  }
  weight.data = static_cast<const char*>(view.data) + view.byte_offset;
  weight.ndim = view.ndim;
  weight.dtype = view.dtype;
  weight.dims_at = static_cast<std::uint32_t>(dims_.size());
  dims_.insert(dims_.end(), view.shape, view.shape + view.ndim);
  dims_.insert(dims_.end(), view.strides, view.strides + view.ndim);
  const bool numbers = !trains_ || place[0] != '\0';
  const bool parameter = facts.is_parameter(value);
  if (parameter) {
    writes_->watch(value);
    if (numbers && writes_->has_alias(value)) aliased_ = weights_.size();
  }
  if (numbers && (all_contents_ || !parameter) && view.device.device_type == kDLCPU) {
    contents_.add(weight.data, span_of(view), weights_.size());
  }
  weights_.push_back(std::move(weight));
  return Reason::kNone;
}

Reason Guard::snapshot(PyObject* root, const TorchFacts& facts, PyObject* sources) {
  clear();
  if (all_contents_) contents_.compare_within(kCallsForAll);
  detail_.clear();
  default_dtype_ = facts.default_dtype();
  writes_ = facts.writes();
  clock_ = writes_->clock();
  if (sources != Py_None) {
    const auto fields = py::reinterpret_borrow<py::tuple>(sources);
    set_names(fields[0].ptr(), fields[1].cast<bool>());
    const auto asked = fields[9].cast<std::array<bool, 3>>();
    asks_ = {.training = asked[0], .requires_grad = asked[1], .gradients = asked[2]};
  }
  struct Pending {
    py::object module;
    std::string path;
  };
  std::vector<Pending> pending = {{py::reinterpret_borrow<py::object>(root), ""}};
  std::unordered_set<PyObject*> seen_modules;
  while (!pending.empty()) {
    const Pending next = std::move(pending.back());
    pending.pop_back();
    PyObject* module = next.module.ptr();
    if (!PyObject_TypeCheck(module, facts.module_type())) {
      detail_ = next.path + ": not an nn.Module";
      return Reason::kModule;
    }
    if (!seen_modules.insert(module).second) continue;
    const bool is_root = module == root;
    const auto index = static_cast<std::uint32_t>(modules_.size());
    add_module(module, is_root, next.path);
    const auto attributes = next.module.attr("__dict__").cast<py::dict>();
    add_dict(attributes.ptr(), is_root, Kind::kAttributes, index);
    if (Reason bad = add_weights(attributes.ptr(), index, facts); bad != Reason::kNone) return bad;
    for (const char* name : kTensorHolders) {
      const auto dict = attributes[name].cast<py::dict>();
      add_dict(dict.ptr(), false, Kind::kExact, index);
      if (Reason bad = add_weights(dict.ptr(), index, facts); bad != Reason::kNone) return bad;
    }
    for (const char* name : kHookHolders) {
      add_dict(attributes[name].cast<py::dict>().ptr(), false, Kind::kHooks, index);
    }
    for (auto [key, child] : attributes["_modules"].cast<py::dict>()) {
      if (child.is_none()) continue;
      const std::string name = py::str(key);
      pending.push_back({py::reinterpret_borrow<py::object>(child),
                         next.path.empty() ? name : next.path + "." + name});
    }
  }
  if (Reason bad = add_sources(root, sources, facts); bad != Reason::kNone) return bad;
  const Reason verdict = check(root, facts);
  taken_ = verdict != Reason::kStructure && verdict != Reason::kWeights;
  return verdict;
}

Reason Guard::check_items(Dict& dict, PyObject* object, const TorchFacts& facts) {
  static PyObject* const training = interned("training");
  static PyObject* const forward = interned("forward");
  for (Item& item : dict.items) {
    PyObject* now = PyDict_GetItem(object, item.key.get());
    const bool same = now != nullptr && (dict.kind == Kind::kExact
                                             ? now == item.value.get()
                                             : same_value(item.value.get(), now));
    if (same || (dict.kind != Kind::kExact && taken_over(item, now))) continue;
    detail_ = path_of(dict.module, item.key.get()) + (now ? ": replaced" : ": removed");
    const bool tensor = now != nullptr && facts.is_any_tensor(now);
    return tensor && facts.is_any_tensor(item.value.get()) ? Reason::kWeights : Reason::kStructure;
  }
  if (PyObject* added = added_entry(dict, object)) {
    detail_ = path_of(dict.module, added) + ": added";
    return Reason::kStructure;
  }
  if (!in_order(dict, object)) {
    detail_ = path_of(dict.module, nullptr) + ": in another order";
    return Reason::kStructure;
  }
  if (dict.kind != Kind::kAttributes) return Reason::kNone;
  const Module& module = modules_[dict.module];
  if (!trains_ && PyDict_GetItem(object, training) == Py_True && facts.depends_on_training(module.type)) {
    detail_ = path_of(dict.module, training);
    return Reason::kTraining;
  }
  if (PyDict_GetItem(object, forward) != nullptr) {
    detail_ = path_of(dict.module, forward) + ": replaced on the instance";
    return Reason::kHooks;
  }
  return Reason::kNone;
}

/// Whether entries that are there still follow each other as at the snapshot, where code may walk
/// through them: sequences of modules do.
bool Guard::in_order(const Dict& dict, PyObject* object) const noexcept {
  const bool walked = dict.kind == Kind::kExact || dict.kind == Kind::kWhole;
  if (!walked && (!every_name_ || dict.kind == Kind::kNamed)) return true;
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  std::size_t seen = 0;
  while (PyDict_Next(object, &position, &key, &value)) {
    if (dict.kind != Kind::kWhole && !counts(dict.kind, key)) continue;
    if (seen == dict.items.size() || !same_value(dict.items[seen].key.get(), key)) return false;
    ++seen;
  }
  return true;
}

/// A watched entry (borrowed) that was not there at the snapshot, when the others still are.
PyObject* Guard::added_entry(const Dict& dict, PyObject* object) const noexcept {
  PyObject *key = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  std::size_t seen = 0;
  while (PyDict_Next(object, &position, &key, &value)) {
    if (!counts(dict.kind, key)) continue;
    // Entries keep their order while none is added or removed: the usual case needs no search.
    if (seen < dict.items.size() && dict.items[seen].key.get() == key) {
      ++seen;
      continue;
    }
    bool known = false;
    for (const Item& item : dict.items) {
      known = known || same_value(item.key.get(), key);
    }
    if (!known) return key;
  }
  return nullptr;
}

Reason Guard::check_dict(Dict& dict, PyObject* object, const TorchFacts& facts) {
  Reason verdict = Reason::kNone;
  const std::uint64_t tag = tag_of(object);
  if (dict.kind == Kind::kNamed || dict.kind == Kind::kWhole || dict.kind == Kind::kReached) {
    if (!check_entries(dict, object)) return Reason::kStructure;
  } else if (dict.kind == Kind::kHooks) {
    if (!only_inactive_hooks(object)) {
      detail_ = path_of(dict.module, nullptr) + ": forward hooks";
      return Reason::kHooks;
    }
  } else {
    verdict = check_items(dict, object, facts);
  }
  if (verdict == Reason::kNone) dict.tag = tag;
  return verdict;
}

bool Guard::same_weight(Weight& weight, const TorchFacts& facts) noexcept {
  PyObject* tensor = weight.tensor.get();
  if (weight.has_raw && facts.unchanged(tensor, weight.raw)) return true;
  DLTensor view{};
  if (!facts.view(tensor, &view)) return false;
  if (static_cast<const char*>(view.data) + view.byte_offset != weight.data ||
      view.ndim != weight.ndim || view.dtype.code != weight.dtype.code ||
      view.dtype.bits != weight.dtype.bits || facts.version(tensor) != weight.version ||
      facts.is_lazy_view(tensor)) {
    return false;
  }
  const std::int64_t* dims = dims_.data() + weight.dims_at;
  for (std::int32_t i = 0; i < view.ndim; ++i) {
    if (view.shape[i] != dims[i] || view.strides[i] != dims[view.ndim + i]) return false;
  }
  // Fields that do not matter moved (autograd's own); beyond five dimensions sizes lie elsewhere.
  weight.has_raw = view.ndim <= 5 && facts.remember(tensor, &weight.raw);
  return true;
}

Reason Guard::check(PyObject* root, const TorchFacts& facts) {
  if (facts.global_hooks()) {
    detail_ = "hooks registered for all modules";
    return Reason::kHooks;
  }
  if (facts.default_dtype().get() != default_dtype_.get()) {
    detail_ = "torch's default dtype";
    return Reason::kStructure;
  }
  for (std::size_t i = 0; i < modules_.size(); ++i) {
    PyObject* module = modules_[i].object ? modules_[i].object.get() : root;
    if (Py_TYPE(module) != modules_[i].type) {
      detail_ = path_of(static_cast<std::uint32_t>(i), nullptr) + ": another class";
      return Reason::kStructure;
    }
    if (modules_[i].attributes.replaced()) {
      detail_ = path_of(static_cast<std::uint32_t>(i), nullptr) + ": another __dict__";
      return Reason::kStructure;
    }
  }
  PyObject* root_dict = PyObject_GenericGetDict(root, nullptr);
  if (root_dict == nullptr) {
    PyErr_Clear();
    return Reason::kStructure;
  }
  Py_DECREF(root_dict);  // the instance keeps it
  for (Dict& dict : dicts_) {
    PyObject* object = dict.object ? dict.object.get() : root_dict;
    const bool instance = dict.kind != Kind::kExact && dict.kind != Kind::kHooks;
    if (tags_usable(instance) && tag_of(object) == dict.tag) continue;
    if (Reason bad = check_dict(dict, object, facts); bad != Reason::kNone) return bad;
  }
  if (!check_beside()) return Reason::kStructure;
  for (Weight& weight : weights_) {
    if (!facts.is_plain_tensor(weight.tensor.get())) return moved(weight, ": another class");
    if (trains_ && !weight.place.empty() &&
        facts.requires_grad(weight.tensor.get()) != weight.wants_gradient) {
      return moved(weight, ": wants a gradient, or no longer");
    }
    if ((asks_.requires_grad &&
         facts.requires_grad(weight.tensor.get()) != weight.wants_gradient) ||
        (asks_.gradients && !trains_ && facts.has_gradient(weight.tensor.get()))) {
      detail_ = path_of(weight) + ": what forward may ask of its gradient";
      return Reason::kStructure;
    }
    if (trains_ && weight.place.empty()) continue;
    if (!same_weight(weight, facts)) return moved(weight, "");
  }
  if (const std::size_t owner = contents_.changed(); owner != Contents::kNone) {
    return moved(weights_[owner], ": written in a way that leaves no trace but its content");
  }
  return writes_->clock() == clock_ && aliased_ == SIZE_MAX ? Reason::kNone : check_writes();
}

Reason Guard::check_again(PyObject* root, const TorchFacts& facts, bool lists_by_content) {
  lists_by_content_ = lists_by_content;
  const Reason verdict = check(root, facts);
  lists_by_content_ = false;
  return verdict;
}

Reason Guard::moved(const Weight& weight, const char* how) {
  detail_ = path_of(weight) + how;
  return weight.place.empty() ? Reason::kWeights : Reason::kStructure;
}

/// Notes since the snapshot, and aliases that could be written at any time since.
Reason Guard::check_writes() {
  if (aliased_ != SIZE_MAX) {
    return moved(weights_[aliased_], ": its .data is held, writes through it cannot be seen");
  }
  for (const Weight& weight : weights_) {
    if (trains_ && weight.place.empty()) continue;
    if (writes_->last_write(weight.tensor.get()) <= clock_) continue;
    return moved(weight, ": an optimizer's step, or its .data was read, may have changed it");
  }
  clock_ = writes_->clock();  // tensors of other modules
  return Reason::kNone;
}

bool Guard::any_requires_grad(const TorchFacts& facts) noexcept {
  if (grad_hint_ < weights_.size() && facts.requires_grad(weights_[grad_hint_].tensor.get())) {
    return true;
  }
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    if (!facts.requires_grad(weights_[i].tensor.get())) continue;
    grad_hint_ = i;
    return true;
  }
  return false;
}

int Guard::traverse(visitproc visit, void* arg) const {
  for (const Module& m : modules_) {
    Py_VISIT(m.object.get());
    Py_VISIT(m.attributes.dict.get());
  }
  for (const Class& c : classes_) {
    Py_VISIT(c.type.get());
    for (const PyRef& found : c.found) Py_VISIT(found.get());
  }
  for (const Dict& d : dicts_) {
    Py_VISIT(d.object.get());
    for (const Item& i : d.items) {
      Py_VISIT(i.key.get());
      Py_VISIT(i.value.get());
    }
  }
  for (const Held& h : held_) {
    Py_VISIT(h.object.get());
    for (const PyRef& item : h.items) Py_VISIT(item.get());
  }
  for (const Array& a : arrays_) Py_VISIT(a.object.get());
  for (const Object& o : objects_) {
    Py_VISIT(o.object.get());
    Py_VISIT(o.type.get());
    Py_VISIT(o.attributes.dict.get());
    for (const Item& i : o.slots) {
      Py_VISIT(i.key.get());
      Py_VISIT(i.value.get());
    }
  }
  for (const Function& f : functions_) {
    for (const PyRef* part :
         {&f.function, &f.code, &f.defaults, &f.keyword_defaults, &f.name, &f.doc}) {
      Py_VISIT(part->get());
    }
  }
  for (const PyRef* part : {&registered_.kinds, &registered_.of, &registered_.found}) {
    Py_VISIT(part->get());
  }
  for (const Weight& w : weights_) {
    Py_VISIT(w.tensor.get());
    Py_VISIT(w.key.get());
  }
  return 0;
}

}  // namespace rm::router
