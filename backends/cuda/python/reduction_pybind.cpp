// rm_abstract.ops._ops_reduction
#include <pybind11/stl.h>

#include "module_kit.hpp"
#include "reduction/api.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "reduction";

Reduce kind_of(const std::string& name) {
  std::string all;
  for (int i = 0; i < static_cast<int>(std::size(kReduceNames)); ++i) {
    if (name == kReduceNames[i]) return static_cast<Reduce>(i);
    all += (i ? ", " : "") + std::string(kReduceNames[i]);
  }
  check(invalid("[reduction] expected kind of " + all + ", got " + name));
  return Reduce::sum;
}

void forward(py::handle x, const std::string& kind, py::handle y, py::handle workspace,
             std::uintptr_t stream, const char* kernel) {
  run_op(reduction, {device_tensor(kOp, "x", x), device_tensor(kOp, "y", y), kind_of(kind)}, kernel,
         workspace_of(kOp, workspace), stream_of(stream));
}

std::size_t workspace_bytes(py::handle x, const std::string& kind, py::handle y) {
  return reduction_workspace(
      {device_tensor(kOp, "x", x), device_tensor(kOp, "y", y), kind_of(kind)});
}

py::array forward_numpy(py::handle x, const std::string& kind, const std::vector<int>& axes,
                        const char* kernel) {
  HostCall call(kOp);
  Reduction p;
  p.x = call.upload("x", x), p.kind = kind_of(kind);
  std::vector<py::ssize_t> shape = shape_of(p.x);
  for (const int a : axes) {
    if (a < 0 || a >= p.x.rank) check(invalid("[reduction] expected axes of x, got another"));
    shape[static_cast<std::size_t>(a)] = 1;
  }
  const bool arg = p.kind == Reduce::argmax || p.kind == Reduce::argmin;
  p.y = call.output(shape, arg ? py::dtype::of<std::int64_t>() : dtype_of(x));
  run_op(reduction, p, kernel, call.workspace(reduction_workspace(p)), nullptr);
  return call.download(p.y);
}

}  // namespace

PYBIND11_MODULE(_ops_reduction, m) {
  m.doc() = "Sums, means, products, extremes and their indices over any axes on CUDA.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(reduction_rows()); }, "[(name, range)] of the kernels.");
  m.def(
      "forward", forward, py::arg("x"), py::arg("kind"), py::kw_only(), py::arg("y"),
      py::arg("workspace") = py::none(), py::arg("stream") = 0, py::arg("kernel") = "",
      "y = x reduced over the axes in which y has size 1. kind: sum, mean, prod, max, min (y of "
      "x's "
      "dtype,\naccumulated in fp32), argmax, argmin (y int64: the first index over the reduced "
      "axes). DLPack\ntensors on the device, float32, bfloat16 or float16, any strides. NaN wins. "
      "`workspace`: workspace() bytes, with which\nseveral blocks share a result where there are "
      "few; less is legal. On `stream`. Raises\nInvalidArgument, Unsupported, NoDevice, "
      "DeviceError.");
  m.def("workspace", workspace_bytes, py::arg("x"), py::arg("kind"), py::kw_only(), py::arg("y"),
        "Bytes that let forward spread few results over the device.");
  m.def(
      "forward_numpy", forward_numpy, py::arg("x"), py::arg("kind"), py::kw_only(), py::arg("axes"),
      py::arg("kernel") = "",
      "forward over a host array, reduced axes kept with size 1; bfloat16 is uint16 bit patterns.");
}
