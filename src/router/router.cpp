// Route: the object behind one routed module.  Checks a call, runs its entry, or lets eager serve.
//
// Invariant: an entry runs only after every check of docs/architecture.md (routing) held for this
// very call; whatever fails, the caller gets exactly what the stock module would have given.
#include "router/router.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "router/direct.hpp"
#include "router/guard.hpp"
#include "router/key.hpp"
#include "router/kinds.hpp"
#include "router/torch.hpp"

namespace py = pybind11;

namespace rm::router {
namespace {

constexpr std::size_t kMaxKeys = 256;
// A refused kind of call is looked at again this often: the module may have changed.  In between
// the tree is not compared, which would cost a short forward more than the refusal is worth.
constexpr std::uint32_t kRefusalsBetweenChecks = 16;

struct Entry {
  PyRef run;  // empty: this kind of call is refused
  std::shared_ptr<DirectPrograms> direct;  // asked before `run`; null: there are none
  PyRef direct_object;  // its Python object: the garbage collector follows objects
  std::string code;
  std::string detail;
  std::uint32_t refusals = 0;
};

struct Tally {
  std::uint64_t calls = 0;
  std::string detail;  // of the latest call
};

struct State {
  std::shared_ptr<TorchFacts> facts;
  PyRef module_ref, failure_type;
  // A tuple: what an entry's own failures are. The first is raised by strict, the second is the
  // core's.
  PyRef error_types;
  CallShape shape;
  std::shared_ptr<Guard> guard = std::make_shared<Guard>();  // replaced whole: checks keep theirs
  std::unordered_map<KeyWords, Entry, KeyHash> table;
  std::uint64_t routed = 0;
  std::map<std::string, Tally, std::less<>> declined;
  std::string retired;  // a code: every call stays eager
  std::string pause_code;
  Reason stale = Reason::kNone;  // why the last check sent the caller to the slow path
  std::uint64_t pause = 0;
  std::uint64_t refused = 0;  // refusals in the table, at least
  bool compare_contents = false;  // guards compare the content of weights
  bool strict = false;        // raise instead of serving by eager
  bool gradients = false;     // calls that need gradients are the slow path's, not eager's

  State(PyObject* names, std::size_t positional) : shape(names, positional) {}
};

/// State of a call and not of its route: several threads may call one route at the same time. The
/// addresses are only compared.
struct ThreadsCall {
  const State* original = nullptr;  // the original served the call of the entry that runs now
  const State* served = nullptr;    // a program served the thread's latest call
};
thread_local ThreadsCall this_thread;

struct RouteObject {
  PyObject_HEAD State* state;
};

State& state_of(PyObject* self) { return *reinterpret_cast<RouteObject*>(self)->state; }

void count(State& s, std::string_view code, std::string_view detail) {
  auto found = s.declined.find(code);
  if (found == s.declined.end()) found = s.declined.emplace(code, Tally{}).first;
  ++found->second.calls;
  if (!detail.empty() && found->second.detail != detail) found->second.detail = detail;
}

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

PyObject* call_eager(PyObject* module, PyObject* args, PyObject* kwargs) {
  static PyObject* const name = PyUnicode_InternFromString("_call_impl");
  const PyRef eager = PyRef::steal(PyObject_GetAttr(module, name));
  return eager ? PyObject_Call(eager.get(), args, kwargs) : nullptr;
}

const char* code_of(Reason reason) { return kReasonCodes[static_cast<std::size_t>(reason)]; }

/// Tracing, disabled(), the user's own compilation: somebody asked for the original.  While
/// another thread compiles, the original serves in passing.  None is a failure to accelerate.
bool asked_for(std::string_view code) {
  return code == code_of(Reason::kTracing) || code == code_of(Reason::kDisabled) ||
         code == code_of(Reason::kForeign) || code == code_of(Reason::kCompiling);
}

PyObject* decline(State& s, std::string_view code, std::string_view detail, PyObject* module,
                  PyObject* args, PyObject* kwargs) {
  count(s, code, detail);
  if (!s.strict || asked_for(code)) return call_eager(module, args, kwargs);
  const std::string text = "[route] expected a routed call, got " + std::string(code) +
                           (detail.empty() ? "" : ": " + std::string(detail)) +
                           "; try fallback='warn'";
  const py::handle type = PyTuple_GET_ITEM(s.error_types.get(), 0);
  const py::object error = type(text, py::arg("code") = std::string(code));
  PyErr_SetObject(type.ptr(), error.ptr());
  return nullptr;
}

PyObject* decline(State& s, Reason reason, std::string_view detail, PyObject* module,
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
Reason eligible(State& s, PyObject* module, bool grad, std::string* detail, bool* miss) {
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
PyObject* run_in_python(State& s, PyObject* run, PyObject* flat) {
  const State* const outer = std::exchange(this_thread.original, nullptr);
  PyObject* output = PyObject_CallOneArg(run, flat);
  const bool original = std::exchange(this_thread.original, outer) == &s;
  if (output != nullptr && !original) {
    ++s.routed;
    this_thread.served = &s;
  }
  return output;
}

/// Runs an entry.  Null with an error set, or null without one when it declined before any effect.
PyObject* run_entry(State& s, const Entry& entry, const CallShape::Call& call, std::string* code,
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

PyObject* route_checked(State& s, PyObject* module, PyObject* args, PyObject* kwargs) {
  const char* mode_detail = "";
  if (!s.retired.empty()) return decline(s, s.retired, "", module, args, kwargs);
  if (Reason mode = s.facts->modes(&mode_detail); mode != Reason::kNone) {
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
    if (known != s.table.end() && !known->second.run &&
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
  const Entry& entry = found->second;
  if (!entry.run) return decline(s, entry.code, entry.detail, module, args, kwargs);
  std::string code;
  PyObject* output = run_entry(s, entry, call, &code, &detail);
  if (output != nullptr || PyErr_Occurred() != nullptr) return output;
  return decline(s, code, detail, module, args, kwargs);
}

// ---- methods -------------------------------------------------------------------------------

/// route(args, kwargs): the output, or NotImplemented when the slow path must look at the call.
PyObject* route_try(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "[router] expected try_route(args: tuple, kwargs: dict)");
    return nullptr;
  }
  State& s = state_of(self);
  const PyRef keep = PyRef::borrow(self);  // the call may drop the module and with it the route
  this_thread.served = nullptr;
  PyObject* routed = PyWeakref_GetObject(s.module_ref.get());
  const PyRef caller = calling_module();
  try {
    if (caller && caller.get() != routed) {
      return decline(s, Reason::kForeign, "the slot was copied to another module", caller.get(),
                     args[0], args[1]);
    }
    if (routed == Py_None) {
      PyErr_SetString(PyExc_ReferenceError, "[router] the routed module no longer exists");
      return nullptr;
    }
    const PyRef module = PyRef::borrow(routed);
    return route_checked(s, module.get(), args[0], args[1]);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void route_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<RouteObject*>(self)->state;
  PyObject_GC_Del(self);
  Py_DECREF(type);
}

int route_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const State* s = reinterpret_cast<RouteObject*>(self)->state;
  if (s == nullptr) return 0;
  Py_VISIT(s->module_ref.get());
  for (const auto& [key, entry] : s->table) {
    Py_VISIT(entry.run.get());
    Py_VISIT(entry.direct_object.get());
  }
  if (const int stop = s->shape.traverse(visit, arg); stop != 0) return stop;
  return s->guard->traverse(visit, arg);
}

int route_clear(PyObject* self) {
  State& s = state_of(self);
  s.refused = 0;
  auto table = std::move(s.table);  // dropping entries runs Python code: detach them first
  s.table.clear();
  const std::shared_ptr<Guard> guard = std::exchange(s.guard, std::make_shared<Guard>());
  return 0;
}

template <typename Body>
PyObject* guarded(Body body) {
  try {
    return py::object(body()).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

py::tuple verdict(Reason reason, const std::string& detail) {
  return py::make_tuple(code_of(reason), detail);
}

KeyWords words_of(const py::bytes& key) {
  const std::string raw = key;
  KeyWords words(raw.size() / sizeof(std::uint64_t));
  std::copy(raw.begin(), raw.end(), reinterpret_cast<char*>(words.data()));
  return words;
}

PyObject* route_snapshot(PyObject* self, PyObject* sources) {
  return guarded([&] {
    State& s = state_of(self);
    const PyRef module = PyRef::borrow(PyWeakref_GetObject(s.module_ref.get()));
    auto guard = std::make_shared<Guard>();
    if (s.compare_contents) guard->compare_all_contents();
    const Reason reason = guard->snapshot(module.get(), *s.facts, sources);
    s.guard = guard;
    s.stale = Reason::kNone;
    const bool wanted =
        reason == Reason::kNone && s.facts->grad_enabled() && guard->any_requires_grad(*s.facts);
    if (wanted) return verdict(Reason::kGradients, "gradients are enabled and weights require them");
    return verdict(reason, guard->detail());
  });
}

PyObject* route_describe(PyObject* self, PyObject* packed) {
  return guarded([&]() -> py::object {
    State& s = state_of(self);
    const auto call_args = py::reinterpret_borrow<py::tuple>(packed);
    CallShape::Call call;
    const Reason reason = s.shape.describe(call_args[0].ptr(), call_args[1].ptr(), *s.facts,
                                           s.facts->grad_enabled(), &call);
    if (reason != Reason::kNone) return verdict(reason, call.detail);
    py::tuple flat(call.flat.size());
    for (std::size_t i = 0; i < call.flat.size(); ++i) {
      flat[i] = py::reinterpret_borrow<py::object>(call.flat[i]);
    }
    const auto* raw = reinterpret_cast<const char*>(call.key.data());
    return py::make_tuple("", py::bytes(raw, call.key.size() * sizeof(std::uint64_t)), flat);
  });
}

PyObject* route_bind(PyObject* self, PyObject* packed) {
  return guarded([&]() -> py::object {
    const auto a = py::reinterpret_borrow<py::tuple>(packed);
    if (a.size() != 3) throw py::type_error("[router] expected bind(key, run, direct)");
    Entry entry;
    entry.run = PyRef::borrow(a[1].ptr());
    entry.direct = a[2].cast<std::shared_ptr<DirectPrograms>>();  // null of None
    entry.direct_object = PyRef::borrow(a[2].ptr());
    state_of(self).table.insert_or_assign(words_of(a[0].cast<py::bytes>()), std::move(entry));
    return py::none();
  });
}

PyObject* route_refuse(PyObject* self, PyObject* packed) {
  return guarded([&]() -> py::object {
    const auto a = py::reinterpret_borrow<py::tuple>(packed);
    if (a.size() != 3) throw py::type_error("[router] expected refuse(key, code, detail)");
    Entry entry;
    entry.code = a[1].cast<std::string>();
    entry.detail = a[2].cast<std::string>();
    ++state_of(self).refused;
    state_of(self).table.insert_or_assign(words_of(a[0].cast<py::bytes>()), std::move(entry));
    return py::none();
  });
}

PyObject* route_forget(PyObject* self, PyObject* key) {
  return guarded([&]() -> py::object {
    State& s = state_of(self);
    const auto found = s.table.find(words_of(py::reinterpret_borrow<py::bytes>(key)));
    if (found != s.table.end() && !found->second.run) {
      s.table.erase(found);
      if (s.refused > 0) --s.refused;
    }
    return py::none();
  });
}

PyObject* route_count(PyObject* self, PyObject* packed) {
  return guarded([&]() -> py::object {
    const auto a = py::reinterpret_borrow<py::tuple>(packed);
    count(state_of(self), a[0].cast<std::string>(), a[1].cast<std::string>());
    return py::none();
  });
}

PyObject* route_unrouted(PyObject* self, PyObject*) {
  this_thread.original = &state_of(self);
  Py_RETURN_NONE;
}

PyObject* route_served(PyObject* self, PyObject*) {
  return PyBool_FromLong(this_thread.served == &state_of(self));
}

PyObject* route_uncount(PyObject* self, PyObject* calls) {
  return guarded([&]() -> py::object {
    State& s = state_of(self);
    s.routed -= std::min(s.routed, py::handle(calls).cast<std::uint64_t>());
    return py::none();
  });
}

PyObject* route_pause(PyObject* self, PyObject* packed) {
  return guarded([&]() -> py::object {
    const auto a = py::reinterpret_borrow<py::tuple>(packed);
    state_of(self).pause_code = a[0].cast<std::string>();
    state_of(self).pause = a[1].cast<std::uint64_t>();
    return py::none();
  });
}

PyObject* route_retire(PyObject* self, PyObject* code) {
  return guarded([&]() -> py::object {
    state_of(self).retired = py::handle(code).cast<std::string>();
    return py::none();
  });
}

PyObject* route_strict(PyObject* self, PyObject* on) {
  state_of(self).strict = on == Py_True;
  Py_RETURN_NONE;
}

PyObject* route_compare_contents(PyObject* self, PyObject*) {
  state_of(self).compare_contents = true;
  Py_RETURN_NONE;
}

PyObject* route_gradients(PyObject* self, PyObject* on) {
  state_of(self).gradients = on == Py_True;
  Py_RETURN_NONE;
}

PyObject* route_routed(PyObject* self, PyObject*) {
  return PyLong_FromUnsignedLongLong(state_of(self).routed);
}

PyObject* route_drop(PyObject* self, PyObject*) {
  route_clear(self);
  state_of(self).stale = Reason::kNone;
  Py_RETURN_NONE;
}

/// What the last check found changed: "", "weights" or "structure", and where.
PyObject* route_stale(PyObject* self, PyObject*) {
  return guarded([&] {
    const State& s = state_of(self);
    const char* what = s.stale == Reason::kWeights     ? "weights"
                       : s.stale == Reason::kStructure ? "structure"
                                                       : "";
    return py::make_tuple(what, s.guard->detail());
  });
}

/// For those who serve without calls of the module: the guard's check, now. stale() says of which
/// kind a change is.
PyObject* route_look(PyObject* self, PyObject*) {
  return guarded([&]() -> py::object {
    State& s = state_of(self);
    const PyRef module = PyRef::borrow(PyWeakref_GetObject(s.module_ref.get()));
    const std::shared_ptr<Guard> guard = s.guard;
    if (module.get() == Py_None || !guard->taken()) return py::make_tuple("RM113", "no snapshot");
    const Reason reason = guard->check(module.get(), *s.facts);
    if (reason == Reason::kWeights || reason == Reason::kStructure) s.stale = reason;
    return verdict(reason, guard->detail());
  });
}

PyObject* route_stats(PyObject* self, PyObject*) {
  return guarded([&] {
    const State& s = state_of(self);
    py::dict declined;
    for (const auto& [code, tally] : s.declined) {
      declined[py::str(code)] = py::make_tuple(tally.calls, tally.detail);
    }
    py::dict out;
    out["routed"] = s.routed;
    out["declined"] = declined;
    out["keys"] = s.table.size();
    out["weights"] = s.guard->weights();
    out["modules"] = s.guard->modules();
    return out;
  });
}

PyMethodDef kMethods[] = {
    {"try_route", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(route_try)), METH_FASTCALL,
     "try_route(args, kwargs): the output, or NotImplemented: the slow path must decide"},
    {"snapshot", route_snapshot, METH_O,
     "snapshot(sources) -> (code, detail); code '' when clean; sources: guards/sources.py's rows"},
    {"describe", route_describe, METH_VARARGS,
     "describe(args, kwargs) -> ('', key, flat_inputs) or (code, detail)"},
    {"bind", route_bind, METH_VARARGS,
     "bind(key, run, direct): calls of this key are served by a program of `direct` (DirectPrograms or "
     "None) that fits, else by run(flat)"},
    {"refuse", route_refuse, METH_VARARGS,
     "refuse(key, code, detail): calls of this key stay eager"},
    {"forget", route_forget, METH_O, "forget(key): a refused kind of call is looked at again"},
    {"count", route_count, METH_VARARGS, "count(code, detail): one call declined by the slow path"},
    {"unrouted", route_unrouted, METH_NOARGS,
     "unrouted(): the entry that runs now has the original serve its call"},
    {"served", route_served, METH_NOARGS,
     "served() -> whether this thread's latest call of any route was one of this and was routed"},
    {"uncount", route_uncount, METH_O, "uncount(n): n routed calls were our own measurements"},
    {"pause", route_pause, METH_VARARGS, "pause(code, n): the next n calls stay eager"},
    {"retire", route_retire, METH_O, "retire(code): every later call stays eager; '' undoes it"},
    {"compare_contents", route_compare_contents, METH_NOARGS,
     "compare_contents(): guards compare the content of weights too, a part at every call"},
    {"strict", route_strict, METH_O, "strict(on): raise the error type instead of declining"},
    {"gradients", route_gradients, METH_O,
     "gradients(on): try_route gives NotImplemented for calls that need gradients"},
    {"routed", route_routed, METH_NOARGS, "routed() -> calls that an entry served"},
    {"drop", route_drop, METH_NOARGS, "drop(): forget entries and snapshot"},
    {"stale", route_stale, METH_NOARGS, "stale() -> (what changed, where)"},
    {"look", route_look, METH_NOARGS,
     "look() -> (code, what) of a change since snapshot(); ('', '') when there is none"},
    {"stats", route_stats, METH_NOARGS, "stats() -> dict of counters"},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot kSlots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(route_dealloc)},
                        {Py_tp_traverse, reinterpret_cast<void*>(route_traverse)},
                        {Py_tp_clear, reinterpret_cast<void*>(route_clear)},
                        {Py_tp_methods, kMethods},
                        {0, nullptr}};

PyType_Spec kSpec = {"rm_abstract._core.router.Route", sizeof(RouteObject), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                     kSlots};

py::object make_route(PyTypeObject* type, std::shared_ptr<TorchFacts> facts, py::handle module,
                      const py::tuple& names, std::size_t positional, const py::tuple& error_types,
                      py::handle failure_type) {
  auto state = std::make_unique<State>(names.ptr(), positional);
  state->facts = std::move(facts);
  state->module_ref = PyRef::steal(PyWeakref_NewRef(module.ptr(), nullptr));
  if (!state->module_ref) throw py::error_already_set();
  state->error_types = PyRef::borrow(error_types.ptr());
  state->failure_type = PyRef::borrow(failure_type.ptr());
  auto* route = PyObject_GC_New(RouteObject, type);
  if (route == nullptr) throw py::error_already_set();
  route->state = state.release();
  PyObject_GC_Track(reinterpret_cast<PyObject*>(route));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(route));
}

/// A guard on its own, for a step that trains `module`: a Python object that asks it before each run.
class TrainedTree {
 public:
  TrainedTree(std::shared_ptr<TorchFacts> facts, py::object module, const py::object& sources)
      : facts_(std::move(facts)), module_(std::move(module)) {
    guard_.watch_structure_only();
    verdict_ = guard_.snapshot(module_.ptr(), *facts_, sources.ptr());
  }

  /// (reason code, detail) of what speaks against the program; None when nothing does.
  py::object why_not() {
    if (guard_.taken()) verdict_ = guard_.check(module_.ptr(), *facts_);
    if (verdict_ == Reason::kNone) return py::none();
    return py::make_tuple(kReasonCodes[static_cast<std::size_t>(verdict_)], guard_.detail());
  }

 private:
  std::shared_ptr<TorchFacts> facts_;
  py::object module_;
  Guard guard_;
  Reason verdict_ = Reason::kNone;
};

}  // namespace

void bind_router(py::module_& module) {
  py::module_ router = module.def_submodule("router", "The per-call router of routed modules.");
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&kSpec));
  if (!type) throw py::error_already_set();
  router.attr("Route") = type;
  bind_write_tracker(router);
  bind_direct(router);
  router.def(
      "kind_of", [](const py::object& value) { return name_of(kind_of(value.ptr())); },
      py::arg("value"),
      "How values of this kind are compared: 'plain' by value; 'fixed' (one object a value) and "
      "'scalar' (immutable) by identity; 'tuple', 'list', 'dict', 'set' by what they hold; 'other': "
      "unknown");
  router.def(
      "same_value",
      [](const py::object& before, const py::object& now) {
        return same_value(before.ptr(), now.ptr());
      },
      py::arg("before"), py::arg("now"), "Whether the guard would find two values the same");
  py::class_<TorchFacts, std::shared_ptr<TorchFacts>>(router, "Facts")
      .def(py::init([](py::object torch, py::object disabled, py::object decline,
                       std::shared_ptr<WriteTracker> writes) {
             return std::make_shared<TorchFacts>(torch.ptr(), disabled.ptr(), decline.ptr(),
                                                 std::move(writes));
           }),
           py::arg("torch"), py::arg("disabled_var"), py::arg("decline_type"), py::arg("writes"))
      .def("ignore_training",
           [](TorchFacts& facts, py::type type) { facts.ignore_training(type.ptr()); })
      .def("add_quiet_variable",
           [](TorchFacts& facts, py::object var) { facts.add_quiet_variable(var.ptr()); })
      .def_property_readonly("fast_versions", &TorchFacts::fast_versions)
      .def("version", [](TorchFacts& facts, py::object t) { return facts.version(t.ptr()); });
  py::class_<TrainedTree>(router, "TrainedTree",
                          "Is a module tree that a program trains still what it was made from?")
      .def(py::init<std::shared_ptr<TorchFacts>, py::object, const py::object&>(), py::arg("facts"),
           py::arg("module"), py::arg("sources"))
      .def("why_not", &TrainedTree::why_not, "(reason code, detail), or None when it is.");
  router.def(
      "make_route",
      [type](std::shared_ptr<TorchFacts> facts, py::object target, const py::tuple& names,
             std::size_t positional, const py::tuple& error_types, py::object failure_type) {
        return make_route(reinterpret_cast<PyTypeObject*>(type.ptr()), std::move(facts), target,
                          names, positional, error_types, failure_type);
      },
      py::arg("facts"), py::arg("module"), py::arg("names"), py::arg("positional"),
      py::arg("error_types"), py::arg("failure_type"));
}

}  // namespace rm::router
