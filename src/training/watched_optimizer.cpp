#include "training/watched_optimizer.hpp"

#include <array>
#include <utility>

namespace py = pybind11;

namespace rm::training {
namespace {

/// Settings of a group that choose the formula, or who computes it; the others are numbers or a scheduler's.
constexpr std::array kSettings = {"maximize",      "amsgrad",    "decoupled_weight_decay", "nesterov",
                                  "differentiable", "capturable", "fused",                  "foreach"};

PyObject* name_of(const char* text) { return PyUnicode_InternFromString(text); }

PyObject* setting_name(size_t i) {
  static const auto& names = *[] {
    auto* made = new std::array<PyObject*, kSettings.size()>();
    for (size_t n = 0; n < kSettings.size(); ++n) (*made)[n] = name_of(kSettings[n]);
    return made;
  }();
  return names[i];
}

/// An entry, borrowed; null where there is none.
PyObject* entry(PyObject* dict, PyObject* key) noexcept {
  PyObject* found = PyDict_GetItemWithError(dict, key);
  if (found == nullptr) PyErr_Clear();
  return found;
}

/// A float or an int of Python's; false for anything else, a tensor above all.
bool number(PyObject* value, double* out) noexcept {
  if (value == nullptr || !(PyFloat_Check(value) || PyLong_Check(value))) return false;
  *out = PyFloat_AsDouble(value);
  if (*out != -1.0 || PyErr_Occurred() == nullptr) return true;
  PyErr_Clear();
  return false;
}

PyRef attribute(py::handle object, const char* name) {
  return PyRef::borrow(py::object(object.attr(name)).ptr());
}

bool same_items(PyObject* list, const std::vector<PyRef>& items) noexcept {
  if (!PyList_CheckExact(list) || PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(items.size())) return false;
  for (size_t i = 0; i < items.size(); ++i) {
    if (PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)) != items[i].get()) return false;
  }
  return true;
}

bool same_values(PyObject* dict, const std::vector<PyRef>& values) noexcept {
  if (PyDict_GET_SIZE(dict) != static_cast<Py_ssize_t>(values.size())) return false;
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  for (size_t i = 0; PyDict_Next(dict, &position, &key, &value); ++i) {
    if (i >= values.size() || value != values[i].get()) return false;
  }
  return true;
}

std::vector<PyRef> values_of(PyObject* dict) {
  std::vector<PyRef> out;
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(dict, &position, &key, &value)) out.push_back(PyRef::borrow(value));
  return out;
}

/// What a step calls, which a script may replace in an optimizer or in its class.
const std::array<PyObject*, 3>& functions_of_a_step() {
  static const std::array names = {name_of("step"), name_of("zero_grad"), name_of("_init_group")};
  return names;
}

}  // namespace

WatchedOptimizer::WatchedOptimizer(py::object optimizer, std::vector<autograd::GroupRule> rules,
                                   const py::list& global_hooks)
    : optimizer_(PyRef::borrow(optimizer.ptr())),
      attributes_(attribute(optimizer, "__dict__")),
      list_(attribute(optimizer, "param_groups")),
      states_(attribute(optimizer, "state")),
      type_(Py_TYPE(optimizer.ptr())) {
  for (PyObject* name : functions_of_a_step()) {
    functions_.push_back(PyRef::borrow(entry(attributes_.get(), name)));
    functions_.push_back(PyRef::borrow(_PyType_Lookup(type_, name)));
  }
  const auto dicts = py::reinterpret_borrow<py::list>(list_.get());
  if (dicts.size() != rules.size()) throw py::value_error("[settled_step] expected a rule for each group");
  for (size_t g = 0; g < rules.size(); ++g) {
    const auto dict = py::cast<py::dict>(dicts[g]);
    const auto members = py::cast<py::list>(dict["params"]);
    Group group;
    group.dict = PyRef::borrow(dict.ptr());
    group.members = PyRef::borrow(members.ptr());
    for (const py::handle p : members) group.items.push_back(PyRef::borrow(p.ptr()));
    for (size_t i = 0; i < kSettings.size(); ++i) {
      group.settings.push_back(PyRef::borrow(entry(dict.ptr(), setting_name(i))));
    }
    group.rule = rules[g];
    groups_.push_back(std::move(group));
  }
  for (const char* name : {"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"}) {
    hooks_.push_back({attribute(optimizer, name), {}});
  }
  for (const py::handle dict : global_hooks) {
    hooks_.push_back({PyRef::borrow(py::cast<py::dict>(dict).ptr()), values_of(dict.ptr())});
  }
}

bool WatchedOptimizer::same_group(const Group& group) const noexcept {
  static PyObject* const params = name_of("params");
  if (entry(group.dict.get(), params) != group.members.get()) return false;
  if (!same_items(group.members.get(), group.items)) return false;
  for (size_t i = 0; i < kSettings.size(); ++i) {
    if (entry(group.dict.get(), setting_name(i)) != group.settings[i].get()) return false;
  }
  return true;
}

bool WatchedOptimizer::unchanged() const noexcept {
  static PyObject* const groups = name_of("param_groups");
  static PyObject* const state = name_of("state");
  static PyObject* const own_hooks[] = {name_of("_optimizer_step_pre_hooks"),
                                        name_of("_optimizer_step_post_hooks")};
  PyObject* const held = attributes_.get();
  const PyRef now = PyRef::steal(PyObject_GenericGetDict(optimizer_.get(), nullptr));
  if (!now) PyErr_Clear();
  if (now.get() != held || Py_TYPE(optimizer_.get()) != type_ || entry(held, groups) != list_.get() ||
      entry(held, state) != states_.get()) {
    return false;
  }
  auto function = functions_.begin();
  for (PyObject* name : functions_of_a_step()) {
    if (entry(held, name) != (function++)->get() || _PyType_Lookup(type_, name) != (function++)->get()) return false;
  }
  for (size_t i = 0; i < std::size(own_hooks); ++i) {
    if (entry(held, own_hooks[i]) != hooks_[i].dict.get()) return false;
  }
  for (const Hooks& hooks : hooks_) {
    if (!same_values(hooks.dict.get(), hooks.values)) return false;
  }
  if (!PyList_CheckExact(list_.get()) || PyList_GET_SIZE(list_.get()) != static_cast<Py_ssize_t>(groups_.size())) {
    return false;
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (PyList_GET_ITEM(list_.get(), static_cast<Py_ssize_t>(g)) != groups_[g].dict.get()) return false;
    if (!same_group(groups_[g])) return false;
  }
  return true;
}

bool WatchedOptimizer::numbers(size_t group, double count, double* out) const noexcept {
  static PyObject* const names[] = {name_of("lr"),    name_of("weight_decay"), name_of("momentum"),
                                    name_of("dampening"), name_of("betas"),        name_of("eps")};
  const auto& [dict, members, items, settings, rule] = groups_[group];
  double lr = 0, decay = 0, first = 0, second = 0, eps = 0;
  const auto read = [&](int name, double* to) { return number(entry(dict.get(), names[name]), to); };
  if (!read(0, &lr) || !read(1, &decay) || (decay != 0) != rule.weight_decay) return false;
  if (rule.algorithm == autograd::Algorithm::kSgd) {
    if (!read(2, &first) || !read(3, &second) || (first != 0) != rule.momentum) return false;
    autograd::sgd_numbers(lr, decay, first, second, out);
    return true;
  }
  PyObject* betas = entry(dict.get(), names[4]);
  if (betas == nullptr || !PyTuple_CheckExact(betas) || PyTuple_GET_SIZE(betas) != 2 || !read(5, &eps) ||
      !number(PyTuple_GET_ITEM(betas, 0), &first) || !number(PyTuple_GET_ITEM(betas, 1), &second)) {
    return false;
  }
  return autograd::adam_numbers(lr, decay, first, second, eps, count, out);
}

}  // namespace rm::training
