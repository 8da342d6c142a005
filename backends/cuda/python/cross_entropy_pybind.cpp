// rm_abstract.ops._ops_cross_entropy
#include "cross_entropy/api.hpp"
#include "module_kit.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "cross_entropy";

std::size_t forward_workspace(py::handle logits) {
  CrossEntropyForward p;
  p.logits = device_tensor(kOp, "logits", logits);
  return cross_entropy_workspace(p);
}

void forward(py::handle logits, py::handle target, py::handle loss, py::handle lse,
             py::handle workspace, std::int64_t ignore_index, std::uintptr_t stream,
             const char* kernel) {
  run_op(cross_entropy_forward,
         {device_tensor(kOp, "logits", logits), device_tensor(kOp, "target", target),
          device_tensor(kOp, "loss", loss), device_tensor(kOp, "lse", lse), ignore_index},
         kernel, workspace_of(kOp, workspace), stream_of(stream));
}

void backward(py::handle dloss, py::handle logits, py::handle target, py::handle lse,
              py::handle dlogits, std::int64_t ignore_index, std::uintptr_t stream,
              const char* kernel) {
  run_op(cross_entropy_backward,
         {device_tensor(kOp, "logits", logits), device_tensor(kOp, "target", target),
          device_tensor(kOp, "lse", lse), device_tensor(kOp, "dloss", dloss),
          device_tensor(kOp, "dlogits", dlogits), ignore_index},
         kernel, stream_of(stream));
}

py::tuple forward_numpy(py::handle logits, py::handle target, std::int64_t ignore_index,
                        const char* kernel) {
  HostCall call(kOp);
  CrossEntropyForward p;
  p.logits = call.upload("logits", logits), p.target = call.upload("target", target);
  const std::vector<py::ssize_t> rows = {p.logits.rank ? static_cast<py::ssize_t>(p.logits.shape[0])
                                                       : 1};
  p.loss = call.output(rows, py::dtype::of<float>()),
  p.lse = call.output(rows, py::dtype::of<float>());
  p.ignore_index = ignore_index;
  run_op(cross_entropy_forward, p, kernel, call.workspace(cross_entropy_workspace(p)), nullptr);
  return py::make_tuple(call.download(p.loss), call.download(p.lse));
}

py::array backward_numpy(py::handle dloss, py::handle logits, py::handle target, py::handle lse,
                         std::int64_t ignore_index, const char* kernel) {
  HostCall call(kOp);
  CrossEntropyBackward p;
  p.logits = call.upload("logits", logits), p.target = call.upload("target", target);
  p.lse = call.upload("lse", lse), p.dloss = call.upload("dloss", dloss);
  p.dlogits = call.output(shape_of(p.logits), dtype_of(logits));
  p.ignore_index = ignore_index;
  run_op(cross_entropy_backward, p, kernel, nullptr);
  return call.download(p.dlogits);
}

}  // namespace

PYBIND11_MODULE(_ops_cross_entropy, m) {
  m.doc() = "Cross entropy against class ids on CUDA, the vocabulary in chunks, with gradients.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(cross_entropy_forward_rows()); },
      "[(name, range)] of the forward kernels.");
  m.def(
      "backward_kernels", [] { return describe(cross_entropy_backward_rows()); },
      "[(name, range)] of the backward kernels.");
  m.def("forward_workspace", forward_workspace, py::arg("logits"), "Bytes that forward needs.");
  m.def("forward", forward, py::arg("logits"), py::arg("target"), py::kw_only(), py::arg("loss"),
        py::arg("lse"), py::arg("workspace") = py::none(), py::arg("ignore_index") = -100,
        py::arg("stream") = 0, py::arg("kernel") = "",
        "loss[r] = logsumexp(logits[r]) - logits[r, target[r]], 0 where target is ignore_index, "
        "NaN where\n"
        "it is outside the vocabulary. DLPack tensors on the device: logits [R, V] float32, "
        "bfloat16 or\n"
        "float16, target [R] int64, loss and lse [R] float32. On `stream`, without copies or\n"
        "synchronisation. Raises InvalidArgument, Unsupported, NoDevice, DeviceError.");
  m.def("backward", backward, py::arg("dloss"), py::arg("logits"), py::arg("target"),
        py::arg("lse"), py::kw_only(), py::arg("dlogits"), py::arg("ignore_index") = -100,
        py::arg("stream") = 0, py::arg("kernel") = "",
        "dlogits = (softmax(logits) - onehot(target)) * dloss[r]; dlogits may be logits itself.");
  m.def("forward_numpy", forward_numpy, py::arg("logits"), py::arg("target"), py::kw_only(),
        py::arg("ignore_index") = -100, py::arg("kernel") = "",
        "forward over host arrays: (loss, lse); bfloat16 is uint16 bit patterns.");
  m.def("backward_numpy", backward_numpy, py::arg("dloss"), py::arg("logits"), py::arg("target"),
        py::arg("lse"), py::kw_only(), py::arg("ignore_index") = -100, py::arg("kernel") = "",
        "backward over host arrays: dlogits.");
}
