// rm_abstract.ops._ops_conv2d
#include <pybind11/stl.h>

#include <array>

#include "conv2d/api.hpp"
#include "epilogue_arguments.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "conv2d";
using Pair = std::array<int, 2>;

ConvShape shape_from(const Pair& stride, const Pair& padding, const Pair& dilation, int groups,
                     bool tf32) {
  ConvShape s;
  for (std::size_t d = 0; d < 2; ++d) {
    s.stride[d] = stride[d], s.padding[d] = padding[d], s.dilation[d] = dilation[d];
  }
  s.groups = groups, s.tf32 = tf32;
  return s;
}

bool channels_last(const std::string& layout) {
  if (layout != "nchw" && layout != "nhwc") {
    check(invalid("[conv2d] expected layout of nchw, nhwc, got " + layout));
  }
  return layout == "nhwc";
}

/// An array [N, H, W, C] as the operators see it: [N, C, H, W].
Tensor channels_second(Tensor t, bool last) {
  if (!last || t.rank != 4) return t;
  const Tensor s = t;
  constexpr int kFrom[] = {0, 3, 1, 2};
  for (int d = 0; d < 4; ++d) t.shape[d] = s.shape[kFrom[d]], t.stride[d] = s.stride[kFrom[d]];
  return t;
}

Epilogue epilogue_from(const Tensor* bias, const std::string& activation, float slope) {
  Epilogue e = epilogue_of(kOp, bias != nullptr, "column", activation, slope, 1.0f);
  e.bias = bias;
  return e;
}

/// The shape of y, as checks of the operator will confirm it.
std::vector<py::ssize_t> result_shape(const Tensor& x, const Tensor& w, const ConvShape& s) {
  std::vector<py::ssize_t> y(4, 0);
  if (x.rank != 4 || w.rank != 4) return y;
  y[0] = x.shape[0], y[1] = w.shape[0];
  for (int d = 0; d < 2; ++d) {
    const std::int64_t room =
        x.shape[2 + d] + 2ll * s.padding[d] - s.dilation[d] * (w.shape[2 + d] - 1) - 1;
    y[static_cast<std::size_t>(2 + d)] = room < 0 || s.stride[d] < 1 ? 0 : room / s.stride[d] + 1;
  }
  return y;
}

void forward(py::handle x, py::handle w, py::handle bias, py::handle residual, py::handle y,
             py::handle aux, const Pair& stride, const Pair& padding, const Pair& dilation,
             int groups, const std::string& activation, float slope, bool tf32,
             py::handle workspace, std::uintptr_t stream, const char* kernel) {
  const OptionalTensor b(kOp, "bias", bias), r(kOp, "residual", residual), a(kOp, "aux", aux);
  Conv2d p{device_tensor(kOp, "x", x), device_tensor(kOp, "w", w), device_tensor(kOp, "y", y),
           shape_from(stride, padding, dilation, groups, tf32),
           epilogue_from(b.get(), activation, slope)};
  p.epilogue.residual = r.get(), p.epilogue.aux = a.get();
  run_op(conv2d, p, kernel, workspace_of(kOp, workspace), stream_of(stream));
}

std::size_t workspace_bytes(py::handle x, py::handle w, py::handle y, const Pair& stride,
                            const Pair& padding, const Pair& dilation, int groups, bool tf32,
                            const char* kernel) {
  return conv2d_workspace({device_tensor(kOp, "x", x),
                           device_tensor(kOp, "w", w),
                           device_tensor(kOp, "y", y),
                           shape_from(stride, padding, dilation, groups, tf32),
                           {}},
                          kernel);
}

void backward(py::handle dy, py::handle x, py::handle w, py::handle aux, py::handle dx,
              py::handle dw, py::handle dbias, const Pair& stride, const Pair& padding,
              const Pair& dilation, int groups, const std::string& activation, float slope,
              bool tf32, py::handle workspace, std::uintptr_t stream, const char* kernel) {
  const OptionalTensor a(kOp, "aux", aux), gx(kOp, "dx", dx), gw(kOp, "dw", dw),
      gb(kOp, "dbias", dbias);
  Conv2dBackward p{device_tensor(kOp, "dy", dy), device_tensor(kOp, "x", x),
                   device_tensor(kOp, "w", w), shape_from(stride, padding, dilation, groups, tf32),
                   epilogue_from(nullptr, activation, slope)};
  p.epilogue.aux = a.get(), p.dx = gx.get(), p.dw = gw.get(), p.dbias = gb.get();
  run_op(conv2d_backward, p, kernel, workspace_of(kOp, workspace), stream_of(stream));
}

std::size_t backward_workspace(py::handle dy, py::handle x, py::handle w, py::handle dx,
                               py::handle dw, const Pair& stride, const Pair& padding,
                               const Pair& dilation, int groups, const std::string& activation,
                               bool tf32, bool wants_dx, bool wants_dw, bool wants_dbias,
                               const char* kernel) {
  Conv2dBackward p{device_tensor(kOp, "dy", dy), device_tensor(kOp, "x", x),
                   device_tensor(kOp, "w", w), shape_from(stride, padding, dilation, groups, tf32),
                   epilogue_from(nullptr, activation, 0.0f)};
  Tensor dbias;
  dbias.dtype = p.x.dtype, dbias.rank = 1, dbias.shape[0] = p.w.shape[0], dbias.stride[0] = 1;
  const OptionalTensor gx(kOp, "dx", dx), gw(kOp, "dw", dw);
  if (wants_dx) p.dx = gx.get() ? gx.get() : &p.x;
  if (wants_dw) p.dw = gw.get() ? gw.get() : &p.w;
  if (wants_dbias) p.dbias = &dbias;
  p.epilogue.aux = &p.dy;
  const bool known = (!wants_dx || gx.get()) && (!wants_dw || gw.get());
  return known ? conv2d_backward_workspace(p, kernel) : conv2d_backward_most_workspace(p, kernel);
}

py::object forward_numpy(py::handle x, py::handle w, py::handle bias, py::handle residual,
                         const Pair& stride, const Pair& padding, const Pair& dilation, int groups,
                         const std::string& activation, float slope, bool tf32, bool return_aux,
                         const std::string& layout, const char* kernel) {
  HostCall call(kOp);
  const bool last = channels_last(layout);
  Conv2d p;
  p.x = channels_second(call.upload("x", x), last);
  p.w = channels_second(call.upload("w", w), last);
  p.shape = shape_from(stride, padding, dilation, groups, tf32);
  p.epilogue = epilogue_from(call.upload_optional("bias", bias), activation, slope);
  const Tensor* r = call.upload_optional("residual", residual);
  if (r) p.epilogue.residual = call.keep(channels_second(*r, last));
  std::vector<py::ssize_t> shape = result_shape(p.x, p.w, p.shape);
  if (last) shape = {shape[0], shape[2], shape[3], shape[1]};
  const Tensor y = call.output(shape, dtype_of(x));
  p.y = channels_second(y, last);
  Tensor aux;
  if (return_aux) {
    aux = call.output(shape, dtype_of(x));
    p.epilogue.aux = call.keep(channels_second(aux, last));
  }
  run_op(conv2d, p, kernel, call.workspace(conv2d_workspace(p, kernel)), nullptr);
  if (!return_aux) return call.download(y);
  return py::make_tuple(call.download(y), call.download(aux));
}

py::tuple backward_numpy(py::handle dy, py::handle x, py::handle w, py::handle aux,
                         const Pair& stride, const Pair& padding, const Pair& dilation, int groups,
                         const std::string& activation, float slope, bool tf32, bool has_bias,
                         const std::string& layout, const char* kernel) {
  HostCall call(kOp);
  const bool last = channels_last(layout);
  Conv2dBackward p;
  p.dy = channels_second(call.upload("dy", dy), last);
  const Tensor image = call.upload("x", x), weights = call.upload("w", w);
  p.x = channels_second(image, last), p.w = channels_second(weights, last);
  p.shape = shape_from(stride, padding, dilation, groups, tf32);
  p.epilogue = epilogue_from(nullptr, activation, slope);
  const Tensor* a = call.upload_optional("aux", aux);
  if (a) p.epilogue.aux = call.keep(channels_second(*a, last));
  const Tensor dx = call.output(shape_of(image), dtype_of(x));
  const Tensor dw = call.output(shape_of(weights), dtype_of(w));
  p.dx = call.keep(channels_second(dx, last)), p.dw = call.keep(channels_second(dw, last));
  if (has_bias && p.w.rank == 4) {
    p.dbias = call.keep(call.output({static_cast<py::ssize_t>(p.w.shape[0])}, dtype_of(w)));
  }
  run_op(conv2d_backward, p, kernel, call.workspace(conv2d_backward_workspace(p, kernel)), nullptr);
  return py::make_tuple(call.download(dx), call.download(dw),
                        p.dbias ? py::object(call.download(*p.dbias)) : py::none());
}

constexpr const char* kForward =
    "y = activation(conv2d(x, w) + bias) + residual; aux = what the activation got. DLPack tensors "
    "on the\ndevice of float32, bfloat16 or float16, any strides (channels last is fastest): x [N, "
    "C, H, W],\nw [O, C / groups, KH, KW], bias [O] dense, y, residual and aux [N, O, OH, OW] of "
    "one "
    "layout. Sums in\nfp32. activation: none, relu, leaky_relu (slope), gelu (erf), gelu_tanh, "
    "silu, "
    "tanh, sigmoid. tf32:\nfp32 operands may lose mantissa bits. `workspace`: workspace() bytes. "
    "On "
    "`stream`. Raises\nInvalidArgument, Unsupported, NoDevice, DeviceError.";

}  // namespace

PYBIND11_MODULE(_ops_conv2d, m) {
  m.doc() =
      "Two-dimensional convolution on CUDA with bias, activation and residual, and gradients.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(conv2d_rows()); }, "[(name, range)] of the forward kernels.");
  m.def(
      "backward_kernels", [] { return describe(conv2d_backward_rows()); },
      "[(name, range)] of the backward kernels.");
  const Pair one = {1, 1}, zero = {0, 0};
  m.def("forward", forward, py::arg("x"), py::arg("w"), py::arg("bias") = py::none(),
        py::arg("residual") = py::none(), py::kw_only(), py::arg("y"), py::arg("aux") = py::none(),
        py::arg("stride") = one, py::arg("padding") = zero, py::arg("dilation") = one,
        py::arg("groups") = 1, py::arg("activation") = "none", py::arg("slope") = 0.01f,
        py::arg("tf32") = false, py::arg("workspace") = py::none(), py::arg("stream") = 0,
        py::arg("kernel") = "", kForward);
  m.def("workspace", workspace_bytes, py::arg("x"), py::arg("w"), py::kw_only(), py::arg("y"),
        py::arg("stride") = one, py::arg("padding") = zero, py::arg("dilation") = one,
        py::arg("groups") = 1, py::arg("tf32") = false, py::arg("kernel") = "",
        "Bytes that forward needs for this problem.");
  m.def(
      "backward", backward, py::arg("dy"), py::arg("x"), py::arg("w"), py::arg("aux") = py::none(),
      py::kw_only(), py::arg("dx") = py::none(), py::arg("dw") = py::none(),
      py::arg("dbias") = py::none(), py::arg("stride") = one, py::arg("padding") = zero,
      py::arg("dilation") = one, py::arg("groups") = 1, py::arg("activation") = "none",
      py::arg("slope") = 0.01f, py::arg("tf32") = false, py::arg("workspace") = py::none(),
      py::arg("stream") = 0, py::arg("kernel") = "",
      "Gradients dx, dw, dbias (where given) of forward with the same options; aux as forward "
      "stored it, of\ndy's strides, with an activation. The residual's gradient is dy. Sums have a "
      "fixed order.");
  m.def("backward_workspace", backward_workspace, py::arg("dy"), py::arg("x"), py::arg("w"),
        py::kw_only(), py::arg("dx") = py::none(), py::arg("dw") = py::none(),
        py::arg("stride") = one, py::arg("padding") = zero, py::arg("dilation") = one,
        py::arg("groups") = 1, py::arg("activation") = "none", py::arg("tf32") = false,
        py::arg("wants_dx") = true, py::arg("wants_dw") = true, py::arg("wants_dbias") = true,
        py::arg("kernel") = "",
        "Bytes that backward needs: for dx and dw as given, or, without them, however they will be "
        "laid out.");
  m.def("forward_numpy", forward_numpy, py::arg("x"), py::arg("w"), py::arg("bias") = py::none(),
        py::arg("residual") = py::none(), py::kw_only(), py::arg("stride") = one,
        py::arg("padding") = zero, py::arg("dilation") = one, py::arg("groups") = 1,
        py::arg("activation") = "none", py::arg("slope") = 0.01f, py::arg("tf32") = false,
        py::arg("return_aux") = false, py::arg("layout") = "nchw", py::arg("kernel") = "",
        "forward over host arrays: y, or (y, aux). layout nhwc: x [N, H, W, C], w [O, KH, KW, C / "
        "groups],\ny [N, OH, OW, O]. bfloat16 is uint16 bit patterns.");
  m.def("backward_numpy", backward_numpy, py::arg("dy"), py::arg("x"), py::arg("w"),
        py::arg("aux") = py::none(), py::kw_only(), py::arg("stride") = one,
        py::arg("padding") = zero, py::arg("dilation") = one, py::arg("groups") = 1,
        py::arg("activation") = "none", py::arg("slope") = 0.01f, py::arg("tf32") = false,
        py::arg("has_bias") = false, py::arg("layout") = "nchw", py::arg("kernel") = "",
        "backward over host arrays: (dx, dw, dbias or None).");
}
