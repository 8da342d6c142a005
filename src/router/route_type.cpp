// The Python type of routes: what hooks/router.py calls. Each method checks its arguments, turns C++
// errors into Python's and reads or changes one RouteState.
#include <algorithm>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "router/route.hpp"
#include "router/router.hpp"

namespace py = pybind11;

namespace rm::router {
namespace {

struct RouteObject {
  PyObject_HEAD RouteState* state;
};

RouteState& state_of(PyObject* self) { return *reinterpret_cast<RouteObject*>(self)->state; }

/// The object that `body` makes; null with an error set where it throws.
template <typename Body>
PyObject* guarded(Body body) {
  try {
    if constexpr (std::is_void_v<decltype(body())>) {
      body();
      return py::none().release().ptr();
    } else {
      return py::object(body()).release().ptr();
    }
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

/// route(args, kwargs): the output, or NotImplemented when the slow path must look at the call.
PyObject* route_try(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  if (nargs != 2 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "[router] expected try_route(args: tuple, kwargs: dict)");
    return nullptr;
  }
  const PyRef keep = PyRef::borrow(self);  // the call may drop the module and with it the route
  return guarded([&] {
    return py::reinterpret_steal<py::object>(route_call(state_of(self), args[0], args[1]));
  });
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
  const RouteState* s = reinterpret_cast<RouteObject*>(self)->state;
  if (s == nullptr) return 0;
  Py_VISIT(s->module_ref.get());
  for (const auto& [key, entry] : s->table) {
    Py_VISIT(entry.run.get());
    Py_VISIT(entry.direct_object.get());
  }
  for (const KeptState& state : s->kept) {
    for (const auto& [key, entry] : state.table) {
      Py_VISIT(entry.run.get());
      Py_VISIT(entry.direct_object.get());
    }
    if (const int stop = state.guard->traverse(visit, arg); stop != 0) return stop;
  }
  if (const int stop = s->shape.traverse(visit, arg); stop != 0) return stop;
  return s->guard->traverse(visit, arg);
}

/// Forgets the present snapshot and its entries.
void drop_present(RouteState& s) {
  s.refused = 0;
  auto table = std::move(s.table);  // dropping entries runs Python code: detach them first
  s.table.clear();
  const std::shared_ptr<Guard> guard = std::exchange(s.guard, std::make_shared<Guard>());
}

int route_clear(PyObject* self) {
  RouteState& s = state_of(self);
  const std::vector<KeptState> kept = std::exchange(s.kept, {});
  drop_present(s);
  return 0;
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
    RouteState& s = state_of(self);
    const PyRef module = referent(s.module_ref.get());
    if (!module) throw py::type_error("[router] expected a routed module that lives, got none");
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
    RouteState& s = state_of(self);
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
  return guarded([&] {
    const auto a = py::reinterpret_borrow<py::tuple>(packed);
    if (a.size() != 3) throw py::type_error("[router] expected bind(key, run, direct)");
    RouteEntry entry;
    entry.run = PyRef::borrow(a[1].ptr());
    entry.direct = a[2].cast<std::shared_ptr<DirectPrograms>>();  // null of None
    entry.direct_object = PyRef::borrow(a[2].ptr());
    state_of(self).table.insert_or_assign(words_of(a[0].cast<py::bytes>()), std::move(entry));
  });
}

PyObject* route_refuse(PyObject* self, PyObject* packed) {
  return guarded([&] {
    const auto a = py::reinterpret_borrow<py::tuple>(packed);
    if (a.size() != 4) throw py::type_error("[router] expected refuse(key, code, detail, seconds)");
    RouteEntry entry;
    entry.code = a[1].cast<std::string>();
    entry.detail = a[2].cast<std::string>();
    if (!a[3].is_none()) {
      using Clock = std::chrono::steady_clock;
      const std::chrono::duration<double> pause(a[3].cast<double>());
      entry.again = Clock::now() + std::chrono::duration_cast<Clock::duration>(pause);
    }
    ++state_of(self).refused;
    state_of(self).table.insert_or_assign(words_of(a[0].cast<py::bytes>()), std::move(entry));
  });
}

PyObject* route_forget(PyObject* self, PyObject* key) {
  return guarded([&] {
    RouteState& s = state_of(self);
    const auto found = s.table.find(words_of(py::reinterpret_borrow<py::bytes>(key)));
    if (found != s.table.end() && !found->second.run) {
      s.table.erase(found);
      if (s.refused > 0) --s.refused;
    }
  });
}

PyObject* route_count(PyObject* self, PyObject* packed) {
  return guarded([&] {
    const auto a = py::reinterpret_borrow<py::tuple>(packed);
    count(state_of(self), a[0].cast<std::string>(), a[1].cast<std::string>());
  });
}

PyObject* route_unrouted(PyObject* self, PyObject*) {
  mark_original(state_of(self));
  Py_RETURN_NONE;
}

PyObject* route_served(PyObject* self, PyObject*) {
  return PyBool_FromLong(served_latest(state_of(self)));
}

PyObject* route_uncount(PyObject* self, PyObject* calls) {
  return guarded([&] {
    RouteState& s = state_of(self);
    s.routed -= std::min(s.routed, py::handle(calls).cast<std::uint64_t>());
  });
}

PyObject* route_count_served(PyObject* self, PyObject*) {
  ++state_of(self).routed;
  Py_RETURN_NONE;
}

PyObject* route_pause(PyObject* self, PyObject* packed) {
  return guarded([&] {
    const auto a = py::reinterpret_borrow<py::tuple>(packed);
    state_of(self).pause_code = a[0].cast<std::string>();
    state_of(self).pause = a[1].cast<std::uint64_t>();
  });
}

PyObject* route_retire(PyObject* self, PyObject* code) {
  return guarded([&] {
    state_of(self).retired = py::handle(code).cast<std::string>();
  });
}

template <bool RouteState::* kFlag>
PyObject* route_set(PyObject* self, PyObject* on) {
  state_of(self).*kFlag = on == Py_True;
  Py_RETURN_NONE;
}

PyObject* route_compare_contents(PyObject* self, PyObject*) {
  state_of(self).compare_contents = true;
  Py_RETURN_NONE;
}

PyObject* route_routed(PyObject* self, PyObject*) {
  return PyLong_FromUnsignedLongLong(state_of(self).routed);
}

PyObject* route_drop(PyObject* self, PyObject*) {
  drop_present(state_of(self));
  state_of(self).stale = Reason::kNone;
  Py_RETURN_NONE;
}

auto kept_state(RouteState& s, std::uint64_t number) {
  return std::find_if(s.kept.begin(), s.kept.end(),
                      [number](const KeptState& state) { return state.number == number; });
}

PyObject* route_keep(PyObject* self, PyObject* number) {
  return guarded([&] {
    RouteState& s = state_of(self);
    KeptState state;
    state.number = py::handle(number).cast<std::uint64_t>();
    state.guard = std::exchange(s.guard, std::make_shared<Guard>());
    state.table.swap(s.table);
    state.refused = std::exchange(s.refused, 0);
    s.kept.push_back(std::move(state));
    s.stale = Reason::kNone;
  });
}

PyObject* route_forget_kept(PyObject* self, PyObject* number) {
  return guarded([&] {
    RouteState& s = state_of(self);
    const auto found = kept_state(s, py::handle(number).cast<std::uint64_t>());
    if (found == s.kept.end()) return;
    const KeptState state = std::move(*found);  // dropping entries runs Python code
    s.kept.erase(found);
  });
}

PyObject* route_holding(PyObject* self, PyObject* lists_by_content) {
  return guarded([&]() -> py::object {
    RouteState& s = state_of(self);
    const PyRef module = referent(s.module_ref.get());
    if (!module) return py::none();
    for (std::size_t i = s.kept.size(); i-- > 0;) {
      const std::shared_ptr<Guard> guard = s.kept[i].guard;
      const std::uint64_t number = s.kept[i].number;
      const bool by_content = lists_by_content == Py_True;
      if (guard->check_again(module.get(), *s.facts, by_content) == Reason::kNone) {
        return py::int_(number);
      }
      if (i > s.kept.size()) break;  // a comparison ran Python code that forgot some
    }
    return py::none();
  });
}

PyObject* route_take_back(PyObject* self, PyObject* number) {
  return guarded([&] {
    RouteState& s = state_of(self);
    const auto found = kept_state(s, py::handle(number).cast<std::uint64_t>());
    if (found == s.kept.end()) throw py::key_error("[router] expected a kept state");
    KeptState state = std::move(*found);
    s.kept.erase(found);
    drop_present(s);
    s.guard = std::move(state.guard);
    s.table.swap(state.table);
    s.refused = state.refused;
    s.stale = Reason::kNone;
  });
}

/// What the last check found changed: "", "weights" or "structure", and where.
PyObject* route_stale(PyObject* self, PyObject*) {
  return guarded([&] {
    const RouteState& s = state_of(self);
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
    RouteState& s = state_of(self);
    const PyRef module = referent(s.module_ref.get());
    const std::shared_ptr<Guard> guard = s.guard;
    if (!module || !guard->taken()) return py::make_tuple("RM113", "no snapshot");
    const Reason reason = guard->check(module.get(), *s.facts);
    if (reason == Reason::kWeights || reason == Reason::kStructure) s.stale = reason;
    return verdict(reason, guard->detail());
  });
}

PyObject* route_stats(PyObject* self, PyObject*) {
  return guarded([&] {
    const RouteState& s = state_of(self);
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
     "refuse(key, code, detail, seconds): calls of this key stay eager, for good with None"},
    {"forget", route_forget, METH_O, "forget(key): a refused kind of call is looked at again"},
    {"count", route_count, METH_VARARGS, "count(code, detail): one call declined by the slow path"},
    {"unrouted", route_unrouted, METH_NOARGS,
     "unrouted(): the entry that runs now has the original serve its call"},
    {"served", route_served, METH_NOARGS,
     "served() -> whether this thread's latest call of any route was one of this and was routed"},
    {"count_served", route_count_served, METH_NOARGS,
     "count_served(): a program served a call whose entry was made in it"},
    {"uncount", route_uncount, METH_O, "uncount(n): n routed calls were our own measurements"},
    {"pause", route_pause, METH_VARARGS, "pause(code, n): the next n calls stay eager"},
    {"retire", route_retire, METH_O, "retire(code): every later call stays eager; '' undoes it"},
    {"compare_contents", route_compare_contents, METH_NOARGS,
     "compare_contents(): guards compare the content of weights too, a part at every call"},
    {"strict", route_set<&RouteState::strict>, METH_O,
     "strict(on): raise the error type instead of declining"},
    {"gradients", route_set<&RouteState::gradients>, METH_O,
     "gradients(on): try_route gives NotImplemented for calls that need gradients"},
    {"inner", route_set<&RouteState::inner>, METH_O,
     "inner(on): calls that come from the original of a routed module are left to PyTorch, uncounted"},
    {"routed", route_routed, METH_NOARGS, "routed() -> calls that an entry served"},
    {"drop", route_drop, METH_NOARGS, "drop(): forget entries and snapshot"},
    {"keep", route_keep, METH_O,
     "keep(number): set entries and snapshot aside; there are none now"},
    {"forget_kept", route_forget_kept, METH_O, "forget_kept(number): of what was set aside"},
    {"holding", route_holding, METH_O,
     "holding(lists_by_content) -> the number of a snapshot set aside that the module agrees with, "
     "or None"},
    {"take_back", route_take_back, METH_O,
     "take_back(number): entries and snapshot that were set aside, in place of the present ones"},
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
  auto state = std::make_unique<RouteState>(names.ptr(), positional);
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

}  // namespace

void bind_routes(py::module_& router) {
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&kSpec));
  if (!type) throw py::error_already_set();
  router.attr("Route") = type;
  router.def(
      "make_route",
      [type](std::shared_ptr<TorchFacts> facts, py::object target, const py::tuple& names,
             std::size_t positional, const py::tuple& error_types, py::object failure_type) {
        return make_route(reinterpret_cast<PyTypeObject*>(type.ptr()), std::move(facts), target,
                          names, positional, error_types, failure_type);
      },
      py::arg("facts"), py::arg("module"), py::arg("names"), py::arg("positional"),
      py::arg("error_types"), py::arg("failure_type"));
  router.def(
      "call_original",
      [](py::handle module, const py::tuple& args, const py::dict& kwargs) {
        PyObject* output = call_original(module.ptr(), args.ptr(), kwargs.ptr());
        if (output == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(output);
      },
      "call_original(module, args, kwargs): what module(*args, **kwargs) gives without a router",
      py::arg("module"), py::arg("args"), py::arg("kwargs"));
}

}  // namespace rm::router
