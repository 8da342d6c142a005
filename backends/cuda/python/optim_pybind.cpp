// rm_abstract.ops._ops_optim
#include "module_kit.hpp"
#include "optim/api.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "optim";

Optim settings(const std::string& kind, double lr, double beta1, double beta2, double eps,
               double weight_decay, double momentum, bool nesterov, std::int64_t step) {
  Optim p;
  if (kind != "sgd" && kind != "adam" && kind != "adamw") {
    check(invalid("[optim] expected kind of sgd, adam, adamw, got " + kind));
  }
  p.kind = kind == "sgd" ? Optimiser::sgd : kind == "adam" ? Optimiser::adam : Optimiser::adamw;
  p.lr = lr, p.beta1 = beta1, p.beta2 = beta2, p.eps = eps, p.weight_decay = weight_decay;
  p.momentum = momentum, p.nesterov = nesterov, p.step = step;
  return p;
}

/// Item i of a list, or None where the list is shorter.
py::object item(const py::sequence& list, std::size_t i) {
  return i < list.size() ? py::object(list[i]) : py::none();
}

void step_all(const py::sequence& params, const py::sequence& grads, const py::sequence& m,
              const py::sequence& v, const std::string& kind, double lr, double beta1, double beta2,
              double eps, double weight_decay, double momentum, bool nesterov, py::handle step,
              std::uintptr_t stream, const char* kernel) {
  const bool on_device = !py::isinstance<py::int_>(step);
  Optim p = settings(kind, lr, beta1, beta2, eps, weight_decay, momentum, nesterov,
                     on_device ? 1 : py::cast<std::int64_t>(step));
  const OptionalTensor at(kOp, "step", on_device ? step : py::none());
  p.device_step = at.get();
  if (params.size() != grads.size()) {
    check(invalid("[optim] expected a gradient for each parameter, got " +
                  std::to_string(grads.size()) + " for " + std::to_string(params.size())));
  }
  std::vector<std::unique_ptr<OptionalTensor>> kept;
  for (std::size_t i = 0; i < params.size(); ++i) {
    kept.push_back(std::make_unique<OptionalTensor>(kOp, "m", item(m, i)));
    const Tensor* first = kept.back()->get();
    kept.push_back(std::make_unique<OptionalTensor>(kOp, "v", item(v, i)));
    p.tensors.push_back({device_tensor(kOp, "a parameter", params[i]),
                         device_tensor(kOp, "a gradient", grads[i]), first, kept.back()->get()});
  }
  run_op(optim, p, kernel, stream_of(stream));
}

/// The array as an output of the call that starts as a copy of it.
Tensor changed(HostCall& call, py::handle array) {
  const Tensor from = call.upload("a tensor", array);
  const Tensor to = call.output(shape_of(from), dtype_of(array));
  if (cudaMemcpy(to.data, from.data, static_cast<std::size_t>(numel(from)) * size_of(from.dtype),
                 cudaMemcpyDeviceToDevice) != cudaSuccess) {
    check({Code::device_error, "[optim] expected a copy on the device, got an error"});
  }
  return to;
}

py::tuple step_numpy(py::handle param, py::handle grad, py::handle m, py::handle v,
                     const std::string& kind, double lr, double beta1, double beta2, double eps,
                     double weight_decay, double momentum, bool nesterov, std::int64_t step,
                     const char* kernel) {
  HostCall call(kOp);
  Optim p = settings(kind, lr, beta1, beta2, eps, weight_decay, momentum, nesterov, step);
  OptimTensors t;
  t.param = changed(call, param), t.grad = call.upload("grad", grad);
  if (!m.is_none()) t.m = call.keep(changed(call, m));
  if (!v.is_none()) t.v = call.keep(changed(call, v));
  p.tensors.push_back(t);
  run_op(optim, p, kernel, nullptr);
  return py::make_tuple(call.download(t.param), t.m ? py::object(call.download(*t.m)) : py::none(),
                        t.v ? py::object(call.download(*t.v)) : py::none());
}

}  // namespace

PYBIND11_MODULE(_ops_optim, m) {
  m.doc() = "SGD, Adam and AdamW steps over many tensors at once on CUDA.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(optim_rows()); }, "[(name, range)] of the kernels.");
  m.def("step", step_all, py::arg("params"), py::arg("grads"), py::arg("m") = py::tuple(),
        py::arg("v") = py::tuple(), py::kw_only(), py::arg("kind"), py::arg("lr"),
        py::arg("beta1") = 0.9, py::arg("beta2") = 0.999, py::arg("eps") = 1e-8,
        py::arg("weight_decay") = 0.0, py::arg("momentum") = 0.0, py::arg("nesterov") = false,
        py::arg("step") = 1, py::arg("stream") = 0, py::arg("kernel") = "",
        "One step in place, as torch.optim. kind: sgd (m: momentum buffers, zeros at first), adam, "
        "adamw\n(m, v). Lists of dense DLPack tensors on the device: params and grads of one dtype "
        "(float32,\nbfloat16, float16), m and v of it or float32. step: t from 1, an int, or a "
        "tensor of one int64 or\nfloat32 on the device. On `stream`. Raises InvalidArgument, "
        "Unsupported, NoDevice, DeviceError.");
  m.def("step_numpy", step_numpy, py::arg("param"), py::arg("grad"), py::arg("m") = py::none(),
        py::arg("v") = py::none(), py::kw_only(), py::arg("kind"), py::arg("lr"),
        py::arg("beta1") = 0.9, py::arg("beta2") = 0.999, py::arg("eps") = 1e-8,
        py::arg("weight_decay") = 0.0, py::arg("momentum") = 0.0, py::arg("nesterov") = false,
        py::arg("step") = 1, py::arg("kernel") = "",
        "(param, m, v) after a step, from host arrays; bfloat16 is uint16 bit patterns.");
}
