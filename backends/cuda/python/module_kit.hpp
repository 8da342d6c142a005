// What the operator modules' bindings share: tensors from DLPack or numpy, and typed exceptions.
// DLPack operands are neither copied nor synchronised; numpy operands are copied to the device and
// back.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "_shim/card_shim.hpp"
#include "_shim/op_schema_shim.hpp"

namespace rm::ops_bindings {

namespace py = pybind11;
using cuda_ops::DType;
using cuda_ops::Status;
using cuda_ops::Stream;
using cuda_ops::Tensor;
using cuda_ops::Workspace;

/// Adds InvalidArgument (ValueError), Unsupported (NotImplementedError), NoDevice and DeviceError
/// (RuntimeError) to the module.
void add_exceptions(py::module_& m);

/// Raises the exception of a status that is not ok.
void check(const Status& status);

/// An operator without the interpreter's lock, which other threads may want while it times
/// candidates or waits for the driver; then raises what it says.
template <class... A>
void run_op(Status (*op)(A...), std::type_identity_t<A>... arguments) {
  Status status;
  {
    const py::gil_scoped_release released;
    const cuda_ops::CardScope same_device;
    status = op(arguments...);
  }
  check(status);
}

/// A device tensor of any DLPack producer; the object must stay alive until the work is done.
Tensor device_tensor(const char* op, const char* what, py::handle object);

/// The same for an operand that may be None.
class OptionalTensor {
 public:
  OptionalTensor(const char* op, const char* what, py::handle object);
  const Tensor* get() const { return tensor_ ? &*tensor_ : nullptr; }

 private:
  std::optional<Tensor> tensor_;
};

/// Device memory from the caller: None, or a dense tensor whose bytes are the workspace, its first
/// on a multiple of 256.
Workspace workspace_of(const char* op, py::handle object);

inline Stream stream_of(std::uintptr_t handle) { return reinterpret_cast<Stream>(handle); }

/// Device copies of host arrays for one forward_numpy or backward_numpy call; freed when it ends.
/// bfloat16 comes as numpy's uint16 bit patterns (or ml_dtypes.bfloat16).
class HostCall {
 public:
  explicit HostCall(const char* op) : op_(op) {}
  ~HostCall();
  HostCall(const HostCall&) = delete;
  HostCall& operator=(const HostCall&) = delete;

  Tensor upload(const char* what, py::handle array);
  /// A new array of the shape of `like` (None: null), and its device memory.
  const Tensor* upload_optional(const char* what, py::handle array);
  Tensor output(const std::vector<py::ssize_t>& shape, const py::dtype& dtype);
  const Tensor* keep(const Tensor& t);
  Workspace workspace(std::size_t bytes);
  /// Waits for the work and copies an output back.
  py::array download(const Tensor& t);

 private:
  void* allocate(std::size_t bytes);
  const char* op_;
  std::vector<void*> memory_;
  std::vector<std::unique_ptr<Tensor>> kept_;
  std::vector<std::pair<void*, py::array>> outputs_;
};

std::vector<py::ssize_t> shape_of(const Tensor& t);
py::dtype dtype_of(py::handle array);

/// [(name, range)] of a kernel table.
template <class P>
py::list describe(std::span<const cuda_ops::KernelRow<P>> rows) {
  py::list out;
  for (const auto& row : rows) out.append(py::make_tuple(row.name, row.range));
  return out;
}

}  // namespace rm::ops_bindings
