#include "router/route.hpp"

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

namespace py = pybind11;

namespace rm::router {
namespace {

constexpr std::size_t kMaxKeys = 256;
// A refused kind of call is looked at again this often: the module may have changed.  In between
// the tree is not compared, which would cost a short forward more than the refusal is worth.
constexpr std::uint32_t kRefusalsBetweenChecks = 16;

/// State of a call and not of its route: several threads may call one route at the same time. The
/// addresses are only compared.
struct ThreadsCall {
  const RouteState* original = nullptr;  // the original served the call of the entry that runs now
  const RouteState* served = nullptr;    // a program served the thread's latest call
  int originals = 0;                     // originals of routed modules that run now
};
thread_local ThreadsCall this_thread;

}  // namespace

void count(RouteState& s, std::string_view code, std::string_view detail) {
  auto found = s.declined.find(code);
  if (found == s.declined.end()) found = s.declined.emplace(code, Tally{}).first;
  ++found->second.calls;
  if (!detail.empty() && found->second.detail != detail) found->second.detail = detail;
}

PyObject* call_original(PyObject* module, PyObject* args, PyObject* kwargs) {
  static PyObject* const name = PyUnicode_InternFromString("_call_impl");
  const PyRef original = PyRef::steal(PyObject_GetAttr(module, name));
  if (!original) return nullptr;
  ++this_thread.originals;
  PyObject* output = PyObject_Call(original.get(), args, kwargs);
  --this_thread.originals;
  return output;
}

namespace {

/// The module whose __call__ is running, or null when the slot was called by hand.  The slot gets
/// no `self`; copies made by copying __dict__ share it, so the caller's frame is the only witness.
PyRef calling_module() {
  static PyObject* const self_name = PyUnicode_InternFromString("self");
  static PyObject* const call_name = PyUnicode_InternFromString("_wrapped_call_impl");
  PyFrameObject* shim = PyEval_GetFrame();
  if (shim == nullptr) return {};
  const PyRef frame = PyRef::steal(reinterpret_cast<PyObject*>(PyFrame_GetBack(shim)));
  if (!frame) return {};
  auto* raw = reinterpret_cast<PyFrameObject*>(frame.get());
  const PyRef code = PyRef::steal(reinterpret_cast<PyObject*>(PyFrame_GetCode(raw)));
  if (PyUnicode_Compare(reinterpret_cast<PyCodeObject*>(code.get())->co_name, call_name) != 0) {
    return {};
  }
#if PY_VERSION_HEX >= 0x030C0000
  PyObject* module = PyFrame_GetVar(raw, self_name);
#else
  static PyObject* const locals_name = PyUnicode_InternFromString("f_locals");
  const PyRef locals = PyRef::steal(PyObject_GetAttr(frame.get(), locals_name));
  PyObject* module = locals ? PyDict_GetItem(locals.get(), self_name) : nullptr;
  Py_XINCREF(module);
#endif
  if (module == nullptr) PyErr_Clear();
  return PyRef::steal(module);
}

/// Tracing, disabled(), the user's own compilation: somebody asked for the original.  While
/// another thread compiles, the original serves in passing.  None is a failure to accelerate.
bool asked_for(std::string_view code) {
  return code == code_of(Reason::kTracing) || code == code_of(Reason::kDisabled) ||
         code == code_of(Reason::kForeign) || code == code_of(Reason::kCompiling);
}

PyObject* decline(RouteState& s, std::string_view code, std::string_view detail, PyObject* module,
                  PyObject* args, PyObject* kwargs) {
  count(s, code, detail);
  if (!s.strict || asked_for(code)) return call_original(module, args, kwargs);
  const std::string text = "[route] expected a routed call, got " + std::string(code) +
                           (detail.empty() ? "" : ": " + std::string(detail)) +
                           "; try fallback='warn'";
  const py::handle type = PyTuple_GET_ITEM(s.error_types.get(), 0);
  const py::object error = type(text, py::arg("code") = std::string(code));
  PyErr_SetObject(type.ptr(), error.ptr());
  return nullptr;
}

PyObject* decline(RouteState& s, Reason reason, std::string_view detail, PyObject* module,
                  PyObject* args, PyObject* kwargs) {
  return decline(s, code_of(reason), detail, module, args, kwargs);
}

bool root_is_training(PyObject* module) {
  static PyObject* const name = PyUnicode_InternFromString("training");
  const PyRef flag = PyRef::steal(PyObject_GetAttr(module, name));
  if (!flag) PyErr_Clear();
  return flag.get() != Py_False;
}

/// Everything that may speak against routing before the arguments are looked at.  kNone: go on;
/// `miss` is set when only the slow path can decide.
Reason eligible(RouteState& s, PyObject* module, bool grad, std::string* detail, bool* miss) {
  if (root_is_training(module)) {
    *detail = "the module is in training mode";
    return Reason::kTraining;
  }
  const std::shared_ptr<Guard> guard = s.guard;
  *miss = !guard->taken();
  if (*miss) return Reason::kNone;
  const Reason verdict = guard->check(module, *s.facts);
  if (verdict == Reason::kWeights || verdict == Reason::kStructure) {
    s.stale = verdict;
    *miss = true;
    return Reason::kNone;
  }
  if (verdict != Reason::kNone) {
    *detail = guard->detail();
    return verdict;
  }
  if (grad && guard->any_requires_grad(*s.facts)) {
    *detail = "gradients are enabled and weights require them; try torch.no_grad()";
    return Reason::kGradients;
  }
  return Reason::kNone;
}

/// Holds what a call refers to: another thread may change its containers meanwhile.
PyRef tuple_of(const std::vector<PyObject*>& objects) {
  PyRef tuple = PyRef::steal(PyTuple_New(static_cast<Py_ssize_t>(objects.size())));
  for (std::size_t i = 0; tuple && i < objects.size(); ++i) {
    Py_INCREF(objects[i]);
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), objects[i]);
  }
  return tuple;
}

/// The output of an entry that Python runs; null with an error set.
PyObject* run_in_python(RouteState& s, PyObject* run, PyObject* flat) {
  const RouteState* const outer = std::exchange(this_thread.original, nullptr);
  PyObject* output = PyObject_CallOneArg(run, flat);
  const bool original = std::exchange(this_thread.original, outer) == &s;
  if (output != nullptr && !original) {
    ++s.routed;
    this_thread.served = &s;
  }
  return output;
}

/// Runs an entry.  Null with an error set, or null without one when it declined before any effect.
PyObject* run_entry(RouteState& s, const RouteEntry& entry, const CallShape::Call& call, std::string* code,
                    std::string* detail) {
  const PyRef run = entry.run;  // the table may change while Python code runs
  const std::shared_ptr<DirectPrograms> direct = entry.direct;
  const PyRef flat = tuple_of(call.flat);
  if (!flat) return nullptr;
  using Served = DirectPrograms::Served;
  Served served = Served::kNo;
  PyObject* output = nullptr;
  if (direct != nullptr) {
    PyObject* core_error = PyTuple_GET_ITEM(s.error_types.get(), 1);
    served = direct->serve(flat.get(), core_error, &output, code, detail);
  }
  if (served == Served::kDeclined) return nullptr;
  if (served == Served::kNo) {
    output = run_in_python(s, run.get(), flat.get());
  } else if (output != nullptr) {
    ++s.routed;
    this_thread.served = &s;
  }
  if (output != nullptr) return output;
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  const PyRef holders[] = {PyRef::steal(type), PyRef::steal(value), PyRef::steal(trace)};
  if (PyErr_GivenExceptionMatches(value, s.facts->decline_type())) {
    const py::handle decline(value);
    *code = py::str(decline.attr("code")).cast<std::string>();
    *detail = py::str(decline.attr("detail")).cast<std::string>();
    return nullptr;
  }
  if (PyErr_GivenExceptionMatches(value, s.error_types.get())) {
    // Only failures of the entry itself travel under this type: the shim's policy decides.
    const PyRef failure = PyRef::steal(PyObject_CallOneArg(s.failure_type.get(), value));
    if (failure) PyErr_SetObject(s.failure_type.get(), failure.get());
    return nullptr;
  }
  PyErr_SetObject(holders[0].get(), value);
  return nullptr;
}

PyObject* route_checked(RouteState& s, PyObject* module, PyObject* args, PyObject* kwargs) {
  const char* mode_detail = "";
  if (!s.retired.empty()) return decline(s, s.retired, "", module, args, kwargs);
  if (Reason mode = s.facts->modes(&mode_detail); mode != Reason::kNone) {
    if (mode == Reason::kOwn) return call_original(module, args, kwargs);
    return decline(s, mode, mode_detail, module, args, kwargs);
  }
  if (s.pause > 0) {
    --s.pause;
    return decline(s, s.pause_code, "", module, args, kwargs);
  }
  const bool grad = s.facts->grad_enabled();
  CallShape::Call call;
  if (s.refused > 0 && s.guard->taken() && !root_is_training(module)) {
    const Reason odd = s.shape.describe(args, kwargs, *s.facts, grad, &call);
    const auto known = odd == Reason::kNone ? s.table.find(call.key) : s.table.end();
    if (known != s.table.end() && known->second.is_refused() &&
        ++known->second.refusals % kRefusalsBetweenChecks != 0) {
      return decline(s, known->second.code, known->second.detail, module, args, kwargs);
    }
  }
  std::string detail;
  bool miss = false;
  Reason reason = eligible(s, module, grad, &detail, &miss);
  if (reason == Reason::kGradients && s.gradients) Py_RETURN_NOTIMPLEMENTED;
  if (reason != Reason::kNone) return decline(s, reason, detail, module, args, kwargs);
  if (miss) Py_RETURN_NOTIMPLEMENTED;
  reason = s.shape.describe(args, kwargs, *s.facts, grad, &call);
  if (reason == Reason::kGradients && s.gradients) Py_RETURN_NOTIMPLEMENTED;
  if (reason != Reason::kNone) return decline(s, reason, call.detail, module, args, kwargs);
  const auto found = s.table.find(call.key);
  if (found == s.table.end()) {
    if (s.table.size() < kMaxKeys) Py_RETURN_NOTIMPLEMENTED;
    return decline(s, Reason::kShape, "too many different signatures", module, args, kwargs);
  }
  const RouteEntry& entry = found->second;
  if (entry.is_refused()) return decline(s, entry.code, entry.detail, module, args, kwargs);
  if (!entry.run) Py_RETURN_NOTIMPLEMENTED;  // its time is over
  std::string code;
  PyObject* output = run_entry(s, entry, call, &code, &detail);
  if (output != nullptr || PyErr_Occurred() != nullptr) return output;
  return decline(s, code, detail, module, args, kwargs);
}

}  // namespace

void mark_original(const RouteState& s) noexcept { this_thread.original = &s; }

bool served_latest(const RouteState& s) noexcept { return this_thread.served == &s; }

PyObject* route_call(RouteState& s, PyObject* args, PyObject* kwargs) {
  this_thread.served = nullptr;
  const PyRef routed = referent(s.module_ref.get());
  const PyRef caller = calling_module();
  if (caller && caller.get() != routed.get()) {
    return decline(s, Reason::kForeign, "the slot was copied to another module", caller.get(), args,
                   kwargs);
  }
  if (!routed) {
    PyErr_SetString(PyExc_ReferenceError, "[router] the routed module no longer exists");
    return nullptr;
  }
  // What a call of the model around it needs of an inner model, that model's router answers for.
  if (s.inner && this_thread.originals > 0) return call_original(routed.get(), args, kwargs);
  return route_checked(s, routed.get(), args, kwargs);
}

}  // namespace rm::router
