// The state of one routed module's route, and the decision on one call: its entry runs, or eager
// serves.
//
// Invariant: an entry runs only after every check of docs/architecture.md (routing) held for this
// very call; whatever fails, the caller gets exactly what the stock module would have given.
#pragma once

#include <Python.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "router/direct.hpp"
#include "router/guard.hpp"
#include "router/key.hpp"
#include "router/reason.hpp"
#include "router/torch.hpp"

namespace rm::router {

struct RouteEntry {
  PyRef run;  // empty: this kind of call is refused
  std::shared_ptr<DirectPrograms> direct;  // asked before `run`; null: there are none
  PyRef direct_object;  // its Python object: the garbage collector follows objects
  std::string code;
  std::string detail;
  std::uint32_t refusals = 0;
  std::optional<std::chrono::steady_clock::time_point> again;  // of a refused one; none: for good

  bool is_refused() const {
    return !run && !(again && std::chrono::steady_clock::now() >= *again);
  }
};

struct Tally {
  std::uint64_t calls = 0;
  std::string detail;  // of the latest call
};

/// A snapshot of an earlier state of the module, and the entries that are bound to it.
struct KeptState {
  std::uint64_t number = 0;
  std::shared_ptr<Guard> guard;
  std::unordered_map<KeyWords, RouteEntry, KeyHash> table;
  std::uint64_t refused = 0;
};

struct RouteState {
  std::shared_ptr<TorchFacts> facts;
  PyRef module_ref, failure_type;
  // A tuple: what an entry's own failures are. The first is raised by strict, the second is the
  // core's.
  PyRef error_types;
  CallShape shape;
  std::shared_ptr<Guard> guard = std::make_shared<Guard>();  // replaced whole: checks keep theirs
  std::unordered_map<KeyWords, RouteEntry, KeyHash> table;
  std::vector<KeptState> kept;  // the newest last
  std::uint64_t routed = 0;
  std::map<std::string, Tally, std::less<>> declined;
  std::string retired;  // a code: every call stays eager
  std::string pause_code;
  Reason stale = Reason::kNone;  // why the last check sent the caller to the slow path
  std::uint64_t pause = 0;
  std::uint64_t refused = 0;  // refusals in the table, at least
  bool compare_contents = false;  // guards compare the content of weights
  bool strict = false;            // raise instead of serving by eager
  bool inner = false;             // only calls outside of every routed module's original are served
  bool gradients = false;         // calls that need gradients are the slow path's, not eager's

  RouteState(PyObject* names, std::size_t positional) : shape(names, positional) {}
};

/// Counts one call that eager serves; `detail`: of the latest one.
void count(RouteState& s, std::string_view code, std::string_view detail);

/// What ``module(*args, **kwargs)`` gives without a router; null with an error set.
PyObject* call_original(PyObject* module, PyObject* args, PyObject* kwargs);

/// A call of the slot: the output, null with an error set, or NotImplemented when the slow path
/// must look at the call. Throws pybind11 errors.
PyObject* route_call(RouteState& s, PyObject* args, PyObject* kwargs);

/// The original serves the call of the entry that runs on this thread now.
void mark_original(const RouteState& s) noexcept;
/// A program of this route served the latest call of this thread.
bool served_latest(const RouteState& s) noexcept;

}  // namespace rm::router
