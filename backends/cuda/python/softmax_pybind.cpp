// rm_abstract.ops._ops_softmax
#include "module_kit.hpp"
#include "softmax/api.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "softmax";

void forward(py::handle x, py::handle y, bool log, std::uintptr_t stream, const char* kernel) {
  run_op(softmax_forward, {device_tensor(kOp, "x", x), device_tensor(kOp, "y", y), log}, kernel,
         stream_of(stream));
}

void backward(py::handle dy, py::handle y, py::handle dx, bool log, std::uintptr_t stream,
              const char* kernel) {
  run_op(
      softmax_backward,
      {device_tensor(kOp, "dy", dy), device_tensor(kOp, "y", y), device_tensor(kOp, "dx", dx), log},
      kernel, stream_of(stream));
}

py::array forward_numpy(py::handle x, bool log, const char* kernel) {
  HostCall call(kOp);
  SoftmaxForward p;
  p.x = call.upload("x", x), p.log = log;
  p.y = call.output(shape_of(p.x), dtype_of(x));
  run_op(softmax_forward, p, kernel, nullptr);
  return call.download(p.y);
}

py::array backward_numpy(py::handle dy, py::handle y, bool log, const char* kernel) {
  HostCall call(kOp);
  SoftmaxBackward p;
  p.dy = call.upload("dy", dy), p.y = call.upload("y", y), p.log = log;
  p.dx = call.output(shape_of(p.y), dtype_of(y));
  run_op(softmax_backward, p, kernel, nullptr);
  return call.download(p.dx);
}

}  // namespace

PYBIND11_MODULE(_ops_softmax, m) {
  m.doc() = "softmax and log_softmax over the last axis on CUDA, with gradients.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(softmax_forward_rows()); },
      "[(name, range)] of the forward kernels.");
  m.def(
      "backward_kernels", [] { return describe(softmax_backward_rows()); },
      "[(name, range)] of the backward kernels.");
  m.def("forward", forward, py::arg("x"), py::kw_only(), py::arg("y"), py::arg("log") = false,
        py::arg("stream") = 0, py::arg("kernel") = "",
        "y = softmax(x) or log_softmax(x). DLPack tensors [*, N] on the device, float32, bfloat16 "
        "or\n"
        "float16, any row pitch; on `stream` (a cudaStream_t as an integer) without copies or\n"
        "synchronisation. Raises InvalidArgument, Unsupported, NoDevice, DeviceError.");
  m.def("backward", backward, py::arg("dy"), py::arg("y"), py::kw_only(), py::arg("dx"),
        py::arg("log") = false, py::arg("stream") = 0, py::arg("kernel") = "",
        "dx from dy and the forward result y.");
  m.def("forward_numpy", forward_numpy, py::arg("x"), py::kw_only(), py::arg("log") = false,
        py::arg("kernel") = "", "forward over a host array; bfloat16 is uint16 bit patterns.");
  m.def("backward_numpy", backward_numpy, py::arg("dy"), py::arg("y"), py::kw_only(),
        py::arg("log") = false, py::arg("kernel") = "", "backward over host arrays: dx.");
}
