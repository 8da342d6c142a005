// _core.worker: both ends of a worker process for Python (src/worker). Waiting releases the GIL and
// looks for signals a few times a second, so that Ctrl-C ends any request.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backend/registry.hpp"
#include "base/error.hpp"
#include "bindings/bind.hpp"
#include "exchange/core_error.hpp"
#include "bindings/python_plugin.hpp"
#include "bindings/shared_bytes.hpp"
#include "device/worker_service.hpp"
#include "ir/type.hpp"
#include "worker/activity.hpp"
#include "worker/client.hpp"
#include "worker/server.hpp"

namespace rm::bindings {
namespace {

namespace py = pybind11;
using worker::LoadedProgram;
using worker::Slots;
using worker::StateSet;
using worker::Weights;
using worker::Worker;
using Shape = std::pair<std::string, std::vector<int64_t>>;  // ("f32", [2, 384])

void look_for_signals() {
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

worker::WaitLimits limits(double timeout_s, double stall_s = 0) {
  return {timeout_s, &look_for_signals, stall_s};
}

Slots slots_of(const std::vector<Shape>& shapes) {
  Slots out;
  for (const auto& [dtype, dims] : shapes) {
    worker::TensorSlot slot;
    slot.dtype = ir::to_dlpack(ir::parse_dtype(dtype));
    slot.dims = dims;
    out.push_back(std::move(slot));
  }
  return out;
}

/// Slots with names: (name, dtype, dims).
using Named = std::tuple<std::string, std::string, std::vector<int64_t>>;
Slots named_slots(const std::vector<Named>& tensors) {
  Slots out;
  for (const auto& [name, dtype, dims] : tensors) {
    out.push_back({name, ir::to_dlpack(ir::parse_dtype(dtype)), dims, 0, 0, {}});
  }
  return out;
}

/// A writable view of mapped memory that keeps its owner alive.
struct Mapping {
  std::shared_ptr<void> owner;
  worker::SharedMemory* memory;
};

/// Places for tensors of these types, one after the other; Python copies them in.
std::shared_ptr<Weights> make_weights(const std::vector<Named>& tensors) {
  auto out = std::make_shared<Weights>();
  uint64_t bytes = 0;
  out->slots = named_slots(tensors);
  worker::place_slots(out->slots, bytes);
  out->memory = worker::SharedMemory(bytes);
  return out;
}

py::list places(const Slots& slots) {
  py::list out;
  for (const auto& slot : slots) out.append(py::make_tuple(slot.offset, slot.bytes, slot.dims));
  return out;
}

py::dict ready_dict(const worker::Ready& ready) {
  py::dict out;
  out["pid"] = ready.pid;
  out["backend"] = exchange::readable(ready.backend);
  out["version"] = exchange::readable(ready.version);
  out["build_id"] = exchange::readable(ready.build_id);
  out["fingerprint"] = py::bytes(ready.fingerprint);
  return out;
}

std::shared_ptr<Worker> start(const std::vector<std::string>& command,
                              const std::vector<std::string>& environment, double start_timeout_s,
                              double heartbeat_timeout_s, uint64_t memory_limit,
                              const std::string& log_path, double start_stall_s) {
  Worker::Options options;
  options.process = {command, environment, memory_limit, log_path};
  options.start_timeout_s = start_timeout_s;
  options.heartbeat_timeout_s = heartbeat_timeout_s;
  options.start_stall_s = start_stall_s;
  const py::gil_scoped_release unlocked;
  return Worker::start(options, &look_for_signals);
}

SharedBytes compile(Worker& self, uint64_t device, const std::string& program,
                  const std::vector<std::pair<std::string, std::string>>& options,
                  const std::shared_ptr<Weights>& weights, const py::object& progress,
                  double timeout_s, double stall_s) {
  worker::OnProgress on_progress;
  if (!progress.is_none()) {
    on_progress = [&](double fraction, const std::string& stage) {
      const py::gil_scoped_acquire locked;
      progress(fraction, exchange::readable(stage));
    };
  }
  auto artefact = std::make_shared<worker::Bytes>();
  {
    const py::gil_scoped_release unlocked;
    *artefact = self.compile({device, program, options, {}}, weights, on_progress,
                            limits(timeout_s, stall_s));
  }
  const ByteSpan bytes = as_byte_span(artefact->view());
  const auto memory = artefact->memory();
  if (!memory) return {artefact, bytes};
  return {artefact, bytes, std::shared_ptr<const Fd>(memory, &memory->file()), 0};
}

std::shared_ptr<LoadedProgram> load(Worker& self, uint64_t device, const py::buffer& artefact,
                                    const std::shared_ptr<Weights>& weights,
                                    const std::vector<Shape>& inputs,
                                    const std::vector<Shape>& outputs, double timeout_s,
                                    const std::vector<Named>& states, double stall_s) {
  worker::LoadRequest request{device,           {},                {},
                              slots_of(inputs), slots_of(outputs), named_slots(states)};
  std::shared_ptr<const Fd> file;
  const SharedBytes* shared = shared_bytes_of(artefact);
  if (shared != nullptr && shared->file != nullptr) {  // the worker maps it itself
    file = shared->file;
    request.file_offset = shared->offset;
    request.file_bytes = shared->bytes.size();
  } else {
    const py::buffer_info info = artefact.request();
    request.artefact.assign(static_cast<const char*>(info.ptr),
                            static_cast<size_t>(info.size * info.itemsize));
  }
  uint64_t unused = 0;
  worker::place_slots(request.states, unused);  // their sizes
  const py::gil_scoped_release unlocked;
  return self.load(std::move(request), weights, limits(timeout_s, stall_s), file.get());
}

std::shared_ptr<StateSet> make_states(Worker& self, uint64_t device,
                                      const std::vector<Named>& tensors, double timeout_s) {
  const py::gil_scoped_release unlocked;
  return self.make_states(device, named_slots(tensors), limits(timeout_s));
}

void serve(int descriptor, const std::string& name) {
  Backend* backend = backend::registry().find(name);
  if (backend == nullptr) throw_invalid("[worker] expected a loaded plugin, got '" + name + "'");
  device::BackendService service(*backend);
  const py::gil_scoped_release unlocked;
  worker::serve(Fd(descriptor), service);
}

void serve_python(int descriptor, const py::object& vendor) {
  const auto service = make_python_service(vendor);
  const py::gil_scoped_release unlocked;
  worker::serve(Fd(descriptor), *service);
}

/// Which part of the tensors: see worker::StatesRegion.
worker::StatesRegion region_of(uint64_t axis, uint64_t from_start, uint64_t to_start,
                               std::optional<uint64_t> count, const std::vector<uint64_t>& rows) {
  return {axis, from_start, to_start, count.value_or(UINT64_MAX), rows};
}

void bind_states(py::module_& m) {
  py::class_<StateSet, std::shared_ptr<StateSet>> states(
      m, "StateSet", "Tensors on the device that programs update in place.");
  states.def_property_readonly("alive", &StateSet::alive);
  const auto def = [&states](const char* name, auto function) {
    states.def(name, function, py::arg("other"), py::kw_only(), py::arg("axis") = 0,
               py::arg("from_start") = 0, py::arg("to_start") = 0, py::arg("count") = py::none(),
               py::arg("rows") = std::vector<uint64_t>(), py::arg("timeout_s") = 0.0,
               py::call_guard<py::gil_scoped_release>());
  };
  using Rows = std::vector<uint64_t>;
  using Count = std::optional<uint64_t>;
  def("copy_from", [](StateSet& self, const StateSet& other, uint64_t axis, uint64_t from,
                      uint64_t to, Count count, const Rows& rows, double timeout_s) {
    self.copy_from(other, region_of(axis, from, to, count, rows), limits(timeout_s));
  });
  def("read", [](StateSet& self, const Weights& other, uint64_t axis, uint64_t from, uint64_t to,
                 Count count, const Rows& rows, double timeout_s) {
    self.read(other, region_of(axis, from, to, count, rows), limits(timeout_s));
  });
  def("write", [](StateSet& self, const Weights& other, uint64_t axis, uint64_t from, uint64_t to,
                  Count count, const Rows& rows, double timeout_s) {
    self.write(other, region_of(axis, from, to, count, rows), limits(timeout_s));
  });
}

void bind_client(py::module_& m) {
  py::class_<Mapping>(m, "Mapping", py::buffer_protocol()).def_buffer([](Mapping& self) {
    return py::buffer_info(self.memory->data(), 1, "B", 1,
                           {static_cast<ssize_t>(self.memory->size())}, {ssize_t{1}});
  });
  py::class_<Weights, std::shared_ptr<Weights>>(
      m, "Weights", "A model's tensors in shared memory: made empty, filled by the caller.")
      .def(py::init(&make_weights), py::arg("tensors"), "[(name, dtype, dims)]")
      .def_property_readonly(
          "places", [](const Weights& self) { return places(self.slots); },
          "[(offset, bytes, dims)] in order.")
      .def_property_readonly("memory", [](const std::shared_ptr<Weights>& self) {
        return Mapping{self, &self->memory};
      })
      .def("digest", &Weights::digest, py::call_guard<py::gil_scoped_release>(),
           "Tells plugins the digest of every tensor, as it is now.");
  py::class_<LoadedProgram, std::shared_ptr<LoadedProgram>>(m, "LoadedProgram",
                                                            "A program in a worker.")
      .def_property_readonly("inputs",
                             [](const LoadedProgram& self) { return places(self.inputs()); })
      .def_property_readonly("outputs",
                             [](const LoadedProgram& self) { return places(self.outputs()); })
      .def_property_readonly("memory",
                             [](const std::shared_ptr<LoadedProgram>& self) {
                               return Mapping{self, &self->memory()};
                             })
      .def(
          "execute",
          [](LoadedProgram& self, double timeout_s, const std::shared_ptr<StateSet>& states) {
            self.execute(limits(timeout_s), states.get());
          },
          py::arg("timeout_s") = 0.0, py::arg("states") = nullptr,
          py::call_guard<py::gil_scoped_release>());
  py::class_<Worker, std::shared_ptr<Worker>>(m, "Worker", "A worker process, started.")
      .def(py::init(&start), py::arg("command"), py::arg("environment"), py::kw_only(),
           py::arg("start_timeout_s") = 120.0, py::arg("heartbeat_timeout_s") = 30.0,
           py::arg("memory_limit") = 0, py::arg("log_path") = "", py::arg("start_stall_s") = 0.0)
      .def_property_readonly("ready", [](const Worker& self) { return ready_dict(self.ready()); })
      .def_property_readonly("alive", &Worker::alive)
      .def_property_readonly("pid", &Worker::pid)
      .def("log_tail", [](Worker& self) { return exchange::readable(self.log_tail()); })
      .def("compile", &compile, py::arg("device"), py::arg("program"), py::arg("options"),
           py::arg("weights"), py::arg("progress") = py::none(), py::arg("timeout_s") = 0.0,
           py::arg("stall_s") = 0.0)
      .def("load", &load, py::arg("device"), py::arg("artefact"), py::arg("weights"),
           py::arg("inputs"), py::arg("outputs"), py::arg("timeout_s") = 0.0,
           py::arg("states") = std::vector<Named>(), py::arg("stall_s") = 0.0)
      .def("make_states", &make_states, py::arg("device"), py::arg("tensors"),
           py::arg("timeout_s") = 0.0, "Zeros on the device: [(name, dtype, dims)].")
      .def("stop", &Worker::stop, py::call_guard<py::gil_scoped_release>());
}

void bind_stall_watch(py::module_& m) {
  using worker::StallWatch;
  py::class_<StallWatch>(m, "StallWatch",
                         "Whether the processes of a session still do something (activity.hpp).")
      .def(py::init<pid_t, double>(), py::arg("session"), py::arg("limit_s"))
      .def("heard", &StallWatch::heard)
      .def("has_stalled", &StallWatch::has_stalled, py::arg("log_bytes"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_worker(py::module_& m) {
  py::module_ sub = m.def_submodule("worker", "Worker processes: the client's and their own side.");
  bind_states(sub);
  bind_client(sub);
  bind_stall_watch(sub);
  sub.def("serve", &serve, py::arg("descriptor"), py::arg("backend"),
          "In a worker: serves the client on the other end until it closes.");
  sub.def("serve_python", &serve_python, py::arg("descriptor"), py::arg("service"),
          "The same for a plugin in Python (rm_abstract.worker.python_backend).");
}

}  // namespace rm::bindings
