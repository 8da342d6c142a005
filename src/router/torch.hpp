// What the router reads of torch, without linking it: mode flags through torch's own C functions,
// tensors through the DLPack C exchange table, version counters through a probed offset.
//
// Invariant: every fact is feature-detected when the object is made; where a fast way is missing
// the attribute is read instead, and what cannot be read at all makes a call decline.
#pragma once

#include <Python.h>
#include <dlpack/dlpack.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "router/reason.hpp"
#include "router/writes.hpp"

namespace rm::router {

/// An owned reference; the GIL must be held wherever one is copied or dropped.
class PyRef {
 public:
  PyRef() = default;
  static PyRef steal(PyObject* object) { return PyRef(object); }
  static PyRef borrow(PyObject* object) {
    Py_XINCREF(object);
    return PyRef(object);
  }
  PyRef(const PyRef& other) : object_(other.object_) { Py_XINCREF(object_); }
  PyRef(PyRef&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  PyRef& operator=(PyRef other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~PyRef() { Py_XDECREF(object_); }

  PyObject* get() const noexcept { return object_; }
  PyObject* release() noexcept { return std::exchange(object_, nullptr); }
  explicit operator bool() const noexcept { return object_ != nullptr; }

 private:
  explicit PyRef(PyObject* object) : object_(object) {}
  PyObject* object_ = nullptr;
};

/// What a weak reference refers to; empty when that is gone. `weak` is one: nothing is raised.
inline PyRef referent(PyObject* weak) noexcept {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* object = nullptr;
  if (PyWeakref_GetRef(weak, &object) < 0) PyErr_Clear();
  return PyRef::steal(object);
#else
  PyObject* object = PyWeakref_GetObject(weak);
  return object == Py_None ? PyRef() : PyRef::borrow(object);
#endif
}

/// A tensor's own fields, byte for byte, with its memory address and version.  Equal states are
/// equal tensors; states that differ are only a reason to look closer.
struct RawTensor {
  static constexpr std::size_t kMaxBytes = 176;
  const char* impl = nullptr;
  const void* memory = nullptr;
  std::uint32_t version = 0;
  std::array<char, kMaxBytes> fields;
};

class TorchFacts {
 public:
  /// Probes the imported torch module; throws pybind11 errors when a required name is missing.
  TorchFacts(PyObject* torch, PyObject* disabled_var, PyObject* decline_type,
             std::shared_ptr<WriteTracker> writes);

  /// Exactly torch.Tensor or torch.nn.Parameter: subclasses have behaviour we do not know.
  bool is_plain_tensor(PyObject* object) const noexcept {
    return Py_TYPE(object) == tensor_type_ || Py_TYPE(object) == parameter_type_;
  }
  bool is_parameter(PyObject* object) const noexcept {
    return Py_TYPE(object) == parameter_type_;
  }
  bool is_any_tensor(PyObject* object) const noexcept {
    return PyType_IsSubtype(Py_TYPE(object), tensor_type_);
  }

  /// Fills a borrowed view (pointers live as long as the tensor is unchanged).  False when the
  /// tensor has no dense strided view (sparse, meta, quantised); no Python error is left set.
  bool view(PyObject* tensor, DLTensor* out) const noexcept;

  /// Of another layout than dense and strided: found without the error that view() costs torch
  /// (a fraction of a millisecond), once a first tensor has shown that there are such.
  bool is_unusual(PyObject* tensor) const noexcept;

  /// The in-place version; -1 when the tensor does not track one (inference tensors).
  std::int64_t version(PyObject* tensor) const noexcept;
  /// Remembers a tensor's state; false when this torch's layout was not recognised.
  bool remember(PyObject* tensor, RawTensor* out) const noexcept;
  /// The state is exactly what it was: a few loads and one memcmp.
  bool unchanged(PyObject* tensor, const RawTensor& before) const noexcept {
    if (!same_place(tensor, before)) return false;
    const char* counter = load<const char*>(before.impl + counter_offset_);
    return load<std::uint32_t>(counter + version_offset_) == before.version;
  }
  /// It is the same tensor in the same memory, whatever was written there.
  bool same_place(PyObject* tensor, const RawTensor& before) const noexcept {
    const char* impl = load<const char*>(reinterpret_cast<const char*>(tensor) + object_offset_);
    if (impl != before.impl ||
        std::memcmp(impl + kFieldsAt, before.fields.data(), field_bytes_) != 0) {
      return false;
    }
    const char* storage = load<const char*>(impl + storage_offset_);
    return load<const void*>(storage + memory_offset_) == before.memory;
  }
  bool requires_grad(PyObject* tensor) const noexcept;
  /// Whether a tensor's .grad is a tensor.
  bool has_gradient(PyObject* tensor) const noexcept;
  /// A lazily negated or conjugated view: its memory is not its value.
  bool is_lazy_view(PyObject* tensor) const noexcept;
  /// How often torch itself holds the tensor: 1 for one that no graph, view or C++ code holds beside
  /// Python; 0 when this torch does not say.
  std::uint32_t use_count(PyObject* tensor) const noexcept;

  /// disabled(), tracing, exporting, modes, functorch, forward-mode gradients, autocast: cheapest
  /// first.
  Reason modes(const char** detail) const noexcept;
  /// Whether it is the user's disabled(), and no call that captures, compares or recomputes.
  bool disabled_by_user() const noexcept;
  bool grad_enabled() const noexcept;
  /// The type of tensors made without one; empty (no error left set) when torch does not say.
  PyRef default_dtype() const noexcept;
  /// Hooks registered for all modules of the process.
  bool global_hooks() const noexcept;

  /// Modules of exactly this class compute the same in training mode and out of it.
  void ignore_training(PyObject* type) { same_in_training_.insert(PyRef::borrow(type).release()); }
  bool depends_on_training(PyTypeObject* type) const noexcept {
    return !same_in_training_.contains(reinterpret_cast<PyObject*>(type));
  }

  /// A context variable that must be unset or None while a call is routed.
  void add_quiet_variable(PyObject* variable);
  PyObject* decline_type() const noexcept { return decline_type_.get(); }
  PyTypeObject* module_type() const noexcept { return module_type_; }
  bool fast_versions() const noexcept { return version_offset_ >= 0; }
  const std::shared_ptr<WriteTracker>& writes() const noexcept { return writes_; }

 private:
  static constexpr int kFieldsAt = 16;  // past the vtable and the reference counts

  template <typename T>
  static T load(const char* address) noexcept {
    T value;
    std::memcpy(&value, address, sizeof value);
    return value;
  }
  void probe_versions(PyObject* torch);
  void probe_layout(PyObject* torch);
  void probe_use_count(PyObject* torch);
  bool variable_set(PyObject* variable) const noexcept;

  std::shared_ptr<WriteTracker> writes_;
  PyTypeObject* tensor_type_ = nullptr;  // kept alive by torch_
  PyTypeObject* parameter_type_ = nullptr;
  PyTypeObject* module_type_ = nullptr;
  PyRef torch_, disabled_var_, decline_type_;
  PyRef default_dtype_, grad_enabled_, tracing_state_, functorch_level_, autocast_;
  PyRef forward_gradients_;  // the names of torch.autograd.forward_ad
  PyRef dispatch_modes_, function_modes_, compiler_dict_, is_neg_, is_conj_, use_count_;
  std::vector<PyRef> global_hooks_, quiet_variables_;
  std::unordered_set<PyObject*> same_in_training_;  // torch's own classes: they live for ever
  PyRef strided_;
  mutable bool any_unusual_ = false;
  const DLPackExchangeAPI* exchange_ = nullptr;
  int object_offset_ = -1, counter_offset_ = -1, version_offset_ = -1;
  int storage_offset_ = -1, memory_offset_ = -1, use_count_offset_ = -1;
  std::size_t field_bytes_ = 0;  // 0: compare through DLPack
};

}  // namespace rm::router
