// The worker's side of a plugin in Python. Tensors are (name, dtype, dims, memoryview, digest) rows
// over shared memory; constants and inputs can only be read.
#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include "base/error.hpp"
#include "bindings/python_plugin.hpp"
#include "device/worker_service.hpp"
#include "ir/type.hpp"

namespace rm::bindings {
namespace {

namespace py = pybind11;

enum class Access { kRead, kWrite };

py::list rows_of(const worker::MappedTensors& tensors, Access access) {
  py::list out;
  for (const worker::MappedTensor& tensor : tensors) {
    ir::DType dtype{};
    if (!ir::from_dlpack(tensor.slot->dtype, &dtype)) {
      throw_invalid("[worker] expected an element type of the IR, got another");
    }
    out.append(py::make_tuple(
        tensor.slot->name, std::string(ir::name(dtype)), tensor.slot->dims,
        py::memoryview::from_memory(tensor.data, static_cast<ssize_t>(tensor.slot->bytes),
                                    access == Access::kRead),
        py::bytes(tensor.slot->digest)));
  }
  return out;
}

/// Runs `body` with the GIL; what Python raises becomes rm::Error with a reason.
template <class Body>
auto in_python(const char* otherwise, Body&& body) {
  const py::gil_scoped_acquire locked;
  try {
    return body();
  } catch (const py::error_already_set& raised) {
    const Error error = error_of(raised);
    throw Error(error.code(), error.what(),
                error.reason().empty() ? device::reason_of(error.code(), otherwise) : error.reason());
  } catch (const py::cast_error& error) {
    throw Error(RM_INTERNAL, std::string("[plugin] expected another type: ") + error.what(),
                otherwise);
  }
}

/// A set of states, as the Python side made it.
class PythonStates final : public worker::States {
 public:
  explicit PythonStates(py::object set) : set_(std::move(set)) {}
  ~PythonStates() override {
    const py::gil_scoped_acquire locked;
    set_ = py::object();
  }
  const py::object& set() const { return set_; }

 private:
  py::object set_;
};

/// None for no states.
py::object held(const worker::States* states) {
  if (states == nullptr) return py::none();
  return static_cast<const PythonStates*>(states)->set();
}

py::list types_of(const worker::Slots& slots) {
  py::list out;
  for (const worker::TensorSlot& slot : slots) {
    ir::DType dtype{};
    if (!ir::from_dlpack(slot.dtype, &dtype)) {
      throw_invalid("[worker] expected an element type of the IR, got another");
    }
    out.append(py::make_tuple(slot.name, std::string(ir::name(dtype)), slot.dims));
  }
  return out;
}

class PythonRunnable final : public worker::Runnable {
 public:
  explicit PythonRunnable(py::object run) : run_(std::move(run)) {}
  ~PythonRunnable() override {
    const py::gil_scoped_acquire locked;
    run_ = py::object();
  }
  void run(worker::States* states) override {
    in_python(device::kExecuting, [&] { run_(held(states)); });
  }

 private:
  py::object run_;
};

class PythonService final : public worker::Service {
 public:
  explicit PythonService(py::object service) : service_(std::move(service)) {}
  ~PythonService() override {
    const py::gil_scoped_acquire locked;
    service_ = py::object();
  }

  worker::Ready describe() override {
    return in_python("RM401", [&] {
      const py::dict row = service_.attr("describe")();
      return worker::Ready{row["pid"].cast<uint64_t>(), row["backend"].cast<std::string>(),
                           row["version"].cast<std::string>(), row["build_id"].cast<std::string>(),
                           std::string(row["fingerprint"].cast<py::bytes>())};
    });
  }

  size_t executions() override {
    return in_python("RM401", [&] { return service_.attr("executions").cast<size_t>(); });
  }

  worker::Bytes compile(const worker::CompileJob& job) override {
    return in_python(device::kCompiling, [&]() -> worker::Bytes {
      const auto progress = [&](double fraction, const std::string& stage) {
        const py::gil_scoped_release unlocked;
        job.progress(fraction, stage);
        return job.cancelled();
      };
      const py::object artefact = service_.attr("compile")(
          job.device, py::bytes(job.program), py::dict(py::cast(job.options)),
          rows_of(job.constants, Access::kRead), py::cpp_function(progress));
      if (!py::isinstance<py::int_>(artefact)) return std::string(artefact.cast<py::bytes>());
      // A descriptor of memory that the Python side wrote and froze.
      auto memory = std::make_shared<const worker::SharedMemory>(Fd(artefact.cast<int>()), false);
      const size_t size = memory->size();
      return {std::move(memory), size};
    });
  }

  std::unique_ptr<worker::Runnable> load(const worker::LoadJob& job) override {
    return in_python(device::kExecuting, [&]() -> std::unique_ptr<worker::Runnable> {
      return std::make_unique<PythonRunnable>(service_.attr("load")(
          job.device,
          py::memoryview::from_memory(job.artefact.data(),
                                      static_cast<ssize_t>(job.artefact.size())),
          rows_of(job.constants, Access::kRead), rows_of(job.inputs, Access::kRead), rows_of(job.outputs, Access::kWrite),
          types_of(job.states)));
    });
  }

  std::unique_ptr<worker::States> make_states(uint64_t device,
                                              const worker::Slots& slots) override {
    return in_python(device::kExecuting, [&]() -> std::unique_ptr<worker::States> {
      return std::make_unique<PythonStates>(
          service_.attr("make_states")(device, types_of(slots)));
    });
  }

  void copy_states(const worker::CopyJob& job) override {
    in_python(device::kExecuting, [&] {
      const worker::StatesRegion& region = job.region;
      service_.attr("copy_states")(
          held(job.from), held(job.to),
          py::make_tuple(region.axis, region.from_start, region.to_start, region.count,
                         region.rows),
          rows_of(job.host, Access::kWrite));
    });
  }

 private:
  py::object service_;
};

}  // namespace

std::unique_ptr<worker::Service> make_python_service(py::object service) {
  return std::make_unique<PythonService>(std::move(service));
}

}  // namespace rm::bindings
