// Reading torch's state from outside.  See the header for the invariant.
#include "router/torch.hpp"

#include <pybind11/pybind11.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cstring>

#include "exchange/tensor_exchange.hpp"

namespace py = pybind11;

namespace rm::router {
namespace {

PyRef own(const py::object& object) { return PyRef::borrow(object.ptr()); }

/// Reads this process's own memory without risking a fault on a wrong guess.
bool safe_read(std::uintptr_t address, void* out, std::size_t size) {
  iovec local{out, size};
  iovec remote{reinterpret_cast<void*>(address), size};
  return process_vm_readv(getpid(), &local, 1, &remote, 1, 0) == static_cast<ssize_t>(size);
}

/// Calls a C function of no arguments and says whether the answer equals `quiet` (the value that
/// means "not active").  An error counts as active: then eager serves.
template <typename Quiet>
bool quiet_call(const PyRef& function, Quiet is_quiet) {
  if (!function) return true;
  PyObject* answer = PyObject_CallNoArgs(function.get());
  if (answer == nullptr) {
    PyErr_Clear();
    return false;
  }
  const bool quiet = is_quiet(answer);
  Py_DECREF(answer);
  return quiet;
}

bool is_none(PyObject* object) { return object == Py_None; }
bool is_false(PyObject* object) { return object == Py_False; }
bool is_zero(PyObject* object) { return PyLong_Check(object) && PyLong_AsLong(object) == 0; }

}  // namespace

TorchFacts::TorchFacts(PyObject* torch, PyObject* disabled_var, PyObject* decline_type,
                       std::shared_ptr<WriteTracker> writes)
    : writes_(std::move(writes)),
      torch_(PyRef::borrow(torch)),
      disabled_var_(PyRef::borrow(disabled_var)),
      decline_type_(PyRef::borrow(decline_type)) {
  const py::object t = py::reinterpret_borrow<py::object>(torch);
  const py::object c = t.attr("_C");
  tensor_type_ = reinterpret_cast<PyTypeObject*>(t.attr("Tensor").ptr());
  parameter_type_ = reinterpret_cast<PyTypeObject*>(t.attr("nn").attr("Parameter").ptr());
  module_type_ = reinterpret_cast<PyTypeObject*>(t.attr("nn").attr("Module").ptr());
  strided_ = own(t.attr("strided"));
  default_dtype_ = own(t.attr("get_default_dtype"));
  grad_enabled_ = own(t.attr("is_grad_enabled"));
  tracing_state_ = own(c.attr("_get_tracing_state"));
  dispatch_modes_ = own(c.attr("_len_torch_dispatch_stack"));
  function_modes_ = own(c.attr("_len_torch_function_stack"));
  functorch_level_ = own(c.attr("_functorch").attr("maybe_current_level"));
  autocast_ = own(c.attr("_is_any_autocast_enabled"));
  forward_gradients_ = own(py::module_::import("torch.autograd.forward_ad").attr("__dict__"));
  is_neg_ = own(t.attr("Tensor").attr("is_neg"));
  is_conj_ = own(t.attr("Tensor").attr("is_conj"));
  compiler_dict_ = own(t.attr("compiler").attr("__dict__"));
  const py::object modules = t.attr("nn").attr("modules").attr("module");
  for (const char* name : {"_global_forward_hooks", "_global_forward_pre_hooks",
                           "_global_backward_hooks", "_global_backward_pre_hooks"}) {
    global_hooks_.push_back(own(modules.attr(name)));
  }
  exchange_ = exchange::exchange_api(t.attr("Tensor"));  // lives as long as the type
  if (py::hasattr(t.attr("Tensor"), "_use_count")) use_count_ = own(t.attr("Tensor").attr("_use_count"));
  probe_versions(torch);
  if (version_offset_ >= 0) probe_layout(torch);
  if (version_offset_ >= 0 && use_count_) probe_use_count(torch);
}

// The counter is found, not assumed: tensors with known and different versions are made, and the
// one chain object -> implementation -> counter -> number that is right for all of them is kept.
void TorchFacts::probe_versions(PyObject* torch) {
  const py::object t = py::reinterpret_borrow<py::object>(torch);
  if (!py::hasattr(t.attr("Tensor"), "_cdata")) return;
  struct Sample {
    py::object tensor;
    std::uintptr_t object, impl;
    std::uint32_t version;
  };
  std::vector<Sample> samples;
  const std::array<int, 4> bumps = {3, 17, 5, 41};
  for (std::size_t i = 0; i < bumps.size(); ++i) {
    py::object tensor = t.attr("zeros")(4, py::arg("device") = "cpu");
    for (int k = 0; k < bumps[i]; ++k) tensor.attr("zero_")();
    if (i == 1) tensor = tensor.attr("view")(2, 2);  // a view shares its base's counter
    if (i == 2) {
      tensor = t.attr("nn").attr("Parameter")(tensor, py::arg("requires_grad") = false);
      for (int k = 0; k < 29; ++k) tensor.attr("zero_")();
    }
    samples.push_back({tensor, reinterpret_cast<std::uintptr_t>(tensor.ptr()),
                       tensor.attr("_cdata").cast<std::uintptr_t>(),
                       tensor.attr("_version").cast<std::uint32_t>()});
  }
  const auto holds = [&](int object_offset, int counter_offset, int version_offset) {
    for (const Sample& s : samples) {
      std::uintptr_t impl = 0, counter = 0;
      std::uint32_t version = 0;
      if (!safe_read(s.object + object_offset, &impl, sizeof impl) || impl != s.impl) return false;
      if (!safe_read(impl + counter_offset, &counter, sizeof counter)) return false;
      if (counter < 4096 || counter % 8 != 0) return false;
      if (!safe_read(counter + version_offset, &version, sizeof version)) return false;
      if (version != s.version) return false;
    }
    return true;
  };
  const int object_size = static_cast<int>(Py_TYPE(samples[0].tensor.ptr())->tp_basicsize);
  for (int a = sizeof(PyObject); a + 8 <= object_size; a += 8) {
    for (int b = 8; b < 128; b += 8) {
      for (int c = 8; c <= 32; c += 4) {
        if (!holds(a, b, c)) continue;
        object_offset_ = a;
        counter_offset_ = b;
        version_offset_ = c;
        return;
      }
    }
  }
}

// The count lies between the vtable and the fields: the place that says what torch says, for a tensor
// that Python alone holds and for one that views hold as well, while they come and go.
void TorchFacts::probe_use_count(PyObject* torch) {
  const py::object t = py::reinterpret_borrow<py::object>(torch);
  const py::object tensor =
      t.attr("zeros")(4, py::arg("device") = "cpu", py::arg("requires_grad") = true);
  const auto impl = tensor.attr("_cdata").cast<std::uintptr_t>();
  const py::object asked = tensor.attr("_use_count");
  std::vector<py::object> views;
  for (int at = 8; at < kFieldsAt; at += 4) {
    bool right = true;
    for (const std::size_t wanted : {std::size_t{0}, std::size_t{1}, std::size_t{3}, std::size_t{0}}) {
      while (views.size() > wanted) views.pop_back();
      while (views.size() < wanted) views.push_back(tensor.attr("view")(2, 2));
      std::uint32_t found = 0;
      right = right && safe_read(impl + at, &found, sizeof found) && found == asked().cast<std::uint32_t>();
    }
    if (!right) continue;
    use_count_offset_ = at;
    return;
  }
}

// Finds the storage pointer, the memory pointer behind it, and the sizes and strides (ten integers
// in a row for five dimensions); what follows them (offset, count, dtype, device, keys) is compared too.
// Then every kind of change that matters is made, and must show.
void TorchFacts::probe_layout(PyObject* torch) {
  const py::object t = py::reinterpret_borrow<py::object>(torch);
  const py::object plain =
      t.attr("zeros")(py::make_tuple(2, 3, 5, 7, 11), py::arg("device") = "cpu");
  const auto storage = plain.attr("untyped_storage")();
  if (!py::hasattr(storage, "_cdata")) return;
  const auto storage_at = storage.attr("_cdata").cast<std::uintptr_t>();
  const auto memory_at = storage.attr("data_ptr")().cast<std::uintptr_t>();
  const auto impl = plain.attr("_cdata").cast<std::uintptr_t>();
  const std::array<std::int64_t, 10> dims = {2, 3, 5, 7, 11, 1155, 385, 77, 11, 1};
  std::array<std::int64_t, 10> found{};
  std::uintptr_t word = 0;
  std::size_t end = 0;
  for (int at = kFieldsAt; at < 128; at += 8) {
    if (!safe_read(impl + at, &word, sizeof word)) return;
    if (word == storage_at && storage_offset_ < 0) storage_offset_ = at;
    if (safe_read(impl + at, found.data(), sizeof found) && found == dims) {
      // storage offset, count, dtype + device, flags, and the keys of dispatch: a negated view has one
      end = at + sizeof found + 5 * sizeof(std::int64_t);
    }
  }
  for (int at = 8; storage_offset_ > 0 && at < 96 && memory_offset_ < 0; at += 8) {
    if (!safe_read(storage_at + at, &word, sizeof word)) return;
    if (word == memory_at) memory_offset_ = at;
  }
  if (memory_offset_ < 0 || end <= kFieldsAt || end - kFieldsAt > RawTensor::kMaxBytes) return;
  field_bytes_ = end - kFieldsAt;
  const auto shows = [&](const py::object& tensor, const py::object& data) {
    RawTensor before;
    if (!remember(tensor.ptr(), &before) || !unchanged(tensor.ptr(), before)) return false;
    tensor.attr("data") = data;
    return !unchanged(tensor.ptr(), before);
  };
  const auto fresh = [&] {
    return t.attr("arange")(6, py::arg("dtype") = t.attr("float32"), py::arg("device") = "cpu")
        .attr("view")(2, 3);
  };
  const py::object a = fresh(), b = fresh(), c = fresh(), d = fresh(), e = fresh(), f = fresh();
  const bool all = shows(a, a.attr("reshape")(3, 2)) && shows(b, b.attr("view")(t.attr("int32"))) &&
                   shows(c, fresh()) && shows(d, d.attr("t")()) &&
                   shows(e, e.attr("flatten")().attr("narrow")(0, 1, 3).attr("expand")(2, 3)) &&
                   shows(f, t.attr("_neg_view")(f.attr("detach")()));
  if (!all) field_bytes_ = 0;
}

bool TorchFacts::remember(PyObject* tensor, RawTensor* out) const noexcept {
  if (field_bytes_ == 0) return false;
  out->impl = load<const char*>(reinterpret_cast<const char*>(tensor) + object_offset_);
  const char* storage = load<const char*>(out->impl + storage_offset_);
  const char* counter = load<const char*>(out->impl + counter_offset_);
  if (storage == nullptr || counter == nullptr) return false;
  std::memcpy(out->fields.data(), out->impl + kFieldsAt, field_bytes_);
  out->memory = load<const void*>(storage + memory_offset_);
  out->version = load<std::uint32_t>(counter + version_offset_);
  return true;
}

bool TorchFacts::view(PyObject* tensor, DLTensor* out) const noexcept {
  if (any_unusual_ && is_unusual(tensor)) return false;
  if (exchange_->dltensor_from_py_object_no_sync(tensor, out) == 0) return true;
  PyErr_Clear();
  any_unusual_ = true;
  return false;
}

bool TorchFacts::is_unusual(PyObject* tensor) const noexcept {
  static PyObject* const layout_name = PyUnicode_InternFromString("layout");
  static PyObject* const nested_name = PyUnicode_InternFromString("is_nested");
  const PyRef layout = PyRef::steal(PyObject_GetAttr(tensor, layout_name));
  const PyRef nested = PyRef::steal(PyObject_GetAttr(tensor, nested_name));
  if (!layout || !nested) PyErr_Clear();
  return (layout && layout.get() != strided_.get()) || nested.get() == Py_True;
}

std::int64_t TorchFacts::version(PyObject* tensor) const noexcept {
  if (version_offset_ >= 0) {
    const char* object = reinterpret_cast<const char*>(tensor);
    const char* impl = *reinterpret_cast<const char* const*>(object + object_offset_);
    const char* counter = *reinterpret_cast<const char* const*>(impl + counter_offset_);
    if (counter == nullptr) return -1;
    return *reinterpret_cast<const std::uint32_t*>(counter + version_offset_);
  }
  PyObject* answer = PyObject_GetAttrString(tensor, "_version");
  if (answer == nullptr) {
    PyErr_Clear();
    return -1;
  }
  const long version = PyLong_AsLong(answer);
  Py_DECREF(answer);
  return version;
}

bool TorchFacts::requires_grad(PyObject* tensor) const noexcept {
  static PyObject* const name = PyUnicode_InternFromString("requires_grad");
  PyObject* answer = PyObject_GetAttr(tensor, name);
  if (answer == nullptr) {
    PyErr_Clear();
    return true;
  }
  const bool wanted = answer != Py_False;
  Py_DECREF(answer);
  return wanted;
}

bool TorchFacts::has_gradient(PyObject* tensor) const noexcept {
  static PyObject* const name = PyUnicode_InternFromString("grad");
  const PyRef answer = PyRef::steal(PyObject_GetAttr(tensor, name));
  if (!answer) PyErr_Clear();
  return answer.get() != Py_None;
}

bool TorchFacts::is_lazy_view(PyObject* tensor) const noexcept {
  for (const PyRef* function : {&is_neg_, &is_conj_}) {
    PyObject* answer = PyObject_CallOneArg(function->get(), tensor);
    if (answer == nullptr) PyErr_Clear();
    const bool lazy = answer != Py_False;
    Py_XDECREF(answer);
    if (lazy) return true;
  }
  return false;
}

std::uint32_t TorchFacts::use_count(PyObject* tensor) const noexcept {
  if (use_count_offset_ >= 0) {
    const char* impl = load<const char*>(reinterpret_cast<const char*>(tensor) + object_offset_);
    return load<std::uint32_t>(impl + use_count_offset_);
  }
  if (!use_count_) return 0;
  const PyRef answer = PyRef::steal(PyObject_CallOneArg(use_count_.get(), tensor));
  const long count = answer ? PyLong_AsLong(answer.get()) : -1;
  if (count < 0) PyErr_Clear();
  return count < 0 ? 0 : static_cast<std::uint32_t>(count);
}

bool TorchFacts::variable_set(PyObject* variable) const noexcept {
  PyObject* value = nullptr;
  if (PyContextVar_Get(variable, nullptr, &value) < 0) {
    PyErr_Clear();
    return true;
  }
  // An empty dict is transformers' collector with nothing to collect.
  const bool set = value != nullptr && value != Py_None &&
                   !(PyDict_CheckExact(value) && PyDict_GET_SIZE(value) == 0);
  Py_XDECREF(value);
  return set;
}

bool TorchFacts::disabled_by_user() const noexcept {
  PyObject* value = nullptr;
  const bool read = PyContextVar_Get(disabled_var_.get(), nullptr, &value) == 0;
  const PyRef holder = PyRef::steal(value);
  if (!read) PyErr_Clear();
  return value == nullptr || !PyUnicode_Check(value) ||
         PyUnicode_CompareWithASCIIString(value, "user") == 0;
}

Reason TorchFacts::modes(const char** detail) const noexcept {
  if (variable_set(disabled_var_.get())) {
    *detail = "disabled()";
    return disabled_by_user() ? Reason::kDisabled : Reason::kOwn;
  }
  for (const PyRef& variable : quiet_variables_) {
    if (variable_set(variable.get())) {
      *detail = "an outer model collects this model's outputs";
      return Reason::kHooks;
    }
  }
  static PyObject* const exporting = PyUnicode_InternFromString("_is_exporting_flag");
  static PyObject* const compiling = PyUnicode_InternFromString("_is_compiling_flag");
  for (PyObject* flag : {exporting, compiling}) {
    if (PyDict_GetItem(compiler_dict_.get(), flag) == Py_True) {
      *detail = "torch.export or torch.compile is at work";
      return Reason::kTracing;
    }
  }
  if (!quiet_call(tracing_state_, is_none)) {
    *detail = "torch.jit.trace is at work";
    return Reason::kTracing;
  }
  if (!quiet_call(dispatch_modes_, is_zero) || !quiet_call(function_modes_, is_zero)) {
    *detail = "a TorchDispatchMode or TorchFunctionMode is active";
    return Reason::kTracing;
  }
  if (!quiet_call(functorch_level_, is_none)) {
    *detail = "a torch.func transform is active";
    return Reason::kTracing;
  }
  static PyObject* const level = PyUnicode_InternFromString("_current_level");
  if (PyObject* now = PyDict_GetItem(forward_gradients_.get(), level);
      now != nullptr && PyLong_Check(now) && PyLong_AsLong(now) >= 0) {
    *detail = "forward-mode gradients are on";
    return Reason::kTracing;
  }
  if (!quiet_call(autocast_, is_false)) {
    *detail = "autocast is on";
    return Reason::kAutocast;
  }
  return Reason::kNone;
}

bool TorchFacts::grad_enabled() const noexcept { return !quiet_call(grad_enabled_, is_false); }

PyRef TorchFacts::default_dtype() const noexcept {
  PyObject* dtype = PyObject_CallNoArgs(default_dtype_.get());
  if (dtype == nullptr) PyErr_Clear();
  return PyRef::steal(dtype);
}

bool TorchFacts::global_hooks() const noexcept {
  for (const PyRef& hooks : global_hooks_) {
    if (PyDict_GET_SIZE(hooks.get()) != 0) return true;
  }
  return false;
}

void TorchFacts::add_quiet_variable(PyObject* variable) {
  quiet_variables_.push_back(PyRef::borrow(variable));
}

}  // namespace rm::router
