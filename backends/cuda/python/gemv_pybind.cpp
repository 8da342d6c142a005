// rm_abstract.ops._ops_gemv
#include <pybind11/stl.h>

#include "epilogue_arguments.hpp"
#include "gemv/api.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "gemv";

void forward(py::handle x, py::handle w, py::handle scales, py::handle bias, py::handle residual,
             py::handle y, py::handle aux, const std::string& bias_kind,
             const std::string& activation, float slope, float scale, bool stable_weights,
             bool overlap, std::uintptr_t stream, const char* kernel) {
  const OptionalTensor q(kOp, "scales", scales), b(kOp, "bias", bias), r(kOp, "residual", residual),
      a(kOp, "aux", aux);
  Gemv p{device_tensor(kOp, "x", x),
         device_tensor(kOp, "w", w),
         device_tensor(kOp, "y", y),
         q.get(),
         epilogue_of(kOp, b.get(), bias_kind, activation, slope, scale),
         stable_weights,
         overlap};
  p.epilogue.bias = b.get(), p.epilogue.residual = r.get(), p.epilogue.aux = a.get();
  run_op(gemv, p, kernel, stream_of(stream));
}

void group(py::handle x, const std::vector<py::object>& w, const std::vector<py::object>& y,
           const std::vector<py::object>& scales, py::handle norm, py::handle norm_bias, bool centred, bool turned,
           float eps, float weight_offset,
           const std::vector<py::object>& bias, py::handle residual, const std::string& activation, bool gated, bool stable_weights,
           bool overlap, std::uintptr_t stream, const char* kernel) {
  const OptionalTensor n(kOp, "norm", norm), shift(kOp, "norm_bias", norm_bias),
      r(kOp, "residual", residual);
  GemvGroup p;
  p.x = device_tensor(kOp, "x", x);
  p.norm = n.get(), p.norm_bias = shift.get(), p.centred = centred, p.turned = turned, p.eps = eps, p.weight_offset = weight_offset;
  p.count = static_cast<int>(w.size());
  Tensor biases[3], of_scales[3];
  const auto optional = [](const char* name, const std::vector<py::object>& given, std::size_t i,
                           Tensor& to) -> const Tensor* {
    if (i >= given.size() || given[i].is_none()) return nullptr;
    to = device_tensor(kOp, name, given[i]);
    return &to;
  };
  for (std::size_t i = 0; i < w.size() && i < 3; ++i) {
    p.w[i] = device_tensor(kOp, "w", w[i]);
    if (i < y.size()) p.y[i] = device_tensor(kOp, "y", y[i]);
    p.bias[i] = optional("bias", bias, i, biases[i]);
    p.scales[i] = optional("scales", scales, i, of_scales[i]);
  }
  p.residual = r.get();
  p.activation = epilogue_of(kOp, false, "column", activation, 0.0f, 1.0f).activation;
  p.gated = gated, p.stable_weights = stable_weights, p.overlap = overlap;
  run_op(gemv_group, p, kernel, stream_of(stream));
}

py::array forward_numpy(py::handle x, py::handle w, py::handle scales, py::handle bias,
                        py::handle residual, const std::string& bias_kind,
                        const std::string& activation, float slope, float scale,
                        const char* kernel) {
  HostCall call(kOp);
  Gemv p;
  p.x = call.upload("x", x), p.w = call.upload("w", w);
  p.scales = call.upload_optional("scales", scales);
  p.epilogue = epilogue_of(kOp, !bias.is_none(), bias_kind, activation, slope, scale);
  p.epilogue.bias = call.upload_optional("bias", bias);
  p.epilogue.residual = call.upload_optional("residual", residual);
  p.y = call.output({p.x.rank > 0 ? static_cast<py::ssize_t>(p.x.shape[0]) : 1,
                     p.w.rank > 0 ? static_cast<py::ssize_t>(p.w.shape[0]) : 1},
                    dtype_of(x));
  run_op(gemv, p, kernel, nullptr);
  return call.download(p.y);
}

}  // namespace

PYBIND11_MODULE(_ops_gemv, m) {
  m.doc() = "Products of few rows with a weight matrix on CUDA, weights of 32, 16, 8 or 4 bits.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(gemv_rows()); }, "[(name, range)] of the kernels.");
  m.def("forward", forward, py::arg("x"), py::arg("w"), py::arg("scales") = py::none(),
        py::arg("bias") = py::none(), py::arg("residual") = py::none(), py::kw_only(), py::arg("y"),
        py::arg("aux") = py::none(), py::arg("bias_kind") = "column",
        py::arg("activation") = "none", py::arg("slope") = 0.01f, py::arg("scale") = 1.0f,
        py::arg("stable_weights") = false, py::arg("overlap") = false, py::arg("stream") = 0,
        py::arg("kernel") = "",
        (std::string("y [M, N] = epilogue(x [M, K] w^T). DLPack tensors on the device: x float32,\n"
                     "bfloat16 or float16; w [N, K] of x's dtype or int8, or uint8 [N, K/2] that "
                     "holds int4 (low\nnibble first, 8 added); int8 and int4 with scales "
                     "[K/group, N] of x's dtype.\n") +
         kEpilogueText +
         "\noverlap: with stable_weights, w, scales and bias are read while earlier work of the "
         "stream still\nruns; everything else is read after it. stable_weights: between whatever "
         "wrote them and this call the\nstream has run something that starts only after all before "
         "it has ended (a copy, a graph's launch, a\nkernel that is not launched to overlap); "
         "one kernel between that overlaps is not enough. y may be\nresidual. On `stream`, without "
         "copies or synchronisation. Raises "
         "InvalidArgument,\nUnsupported, NoDevice, DeviceError.")
            .c_str());
  m.def("group", group, py::arg("x"), py::arg("w"), py::kw_only(), py::arg("y"),
        py::arg("scales") = std::vector<py::object>{}, py::arg("norm") = py::none(),
        py::arg("norm_bias") = py::none(), py::arg("centred") = false, py::arg("turned") = false, py::arg("eps") = 1e-5f, py::arg("weight_offset") = 0.0f,
        py::arg("bias") = std::vector<py::object>{}, py::arg("residual") = py::none(),
        py::arg("activation") = "none", py::arg("gated") = false,
        py::arg("stable_weights") = false, py::arg("overlap") = false, py::arg("stream") = 0,
        py::arg("kernel") = "",
        "Up to three weights [N, K] against x [M, K], its rows normalised first by their root mean "
        "squares (centred: as a\nlayer norm, with `norm_bias`) where `norm` [K] is given: y[i] = activation(x w[i]^T + bias[i]), plus the "
        "residual of one weight (turned: it is [K, N]). gated:\ny[0] = activation(x w[0]^T) * (x w[1]^T). Weights without "
        "gaps between rows, of x's dtype, or all\nint8 or all int4 with `scales` as forward has "
        "them, of one group. Raises as forward.");
  m.def(
      "read_probe",
      [](py::handle data, std::uintptr_t stream) {
        run_op(read_probe, device_tensor(kOp, "data", data), stream_of(stream));
      },
      py::arg("data"), py::kw_only(), py::arg("stream") = 0,
      "Reads a dense tensor of whole 16 KiB pieces once, by bulk copies, and drops it: the "
      "yardstick.");
  m.def("forward_numpy", forward_numpy, py::arg("x"), py::arg("w"), py::arg("scales") = py::none(),
        py::arg("bias") = py::none(), py::arg("residual") = py::none(), py::kw_only(),
        py::arg("bias_kind") = "column", py::arg("activation") = "none", py::arg("slope") = 0.01f,
        py::arg("scale") = 1.0f, py::arg("kernel") = "",
        "forward over host arrays; bfloat16 is uint16 bit patterns.");
}
