// rm_abstract.ops._ops_rope
#include "module_kit.hpp"
#include "rope/api.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "rope";

/// A table as numpy broadcasts it to x's shape.
Tensor broadcast(const Tensor& t, const Tensor& x) {
  Tensor out = t;
  out.rank = x.rank;
  for (int d = 0; d < x.rank; ++d) {
    const int from = d - (x.rank - t.rank);
    const bool whole = from >= 0 && t.shape[from] == x.shape[d];
    if (t.rank > x.rank || (from >= 0 && !whole && t.shape[from] != 1)) {
      check(invalid("[rope] expected cos and sin that broadcast to x's shape"));
    }
    out.shape[d] = x.shape[d], out.stride[d] = whole ? t.stride[from] : 0;
  }
  if (x.rank > 0 && t.rank > 0 && out.shape[x.rank - 1] == 1) out.stride[x.rank - 1] = 1;
  return out;
}

void run(py::handle x, py::handle cos, py::handle sin, py::handle y, bool interleaved,
         bool backward, std::uintptr_t stream, const char* kernel) {
  Rope p{device_tensor(kOp, "x", x),
         device_tensor(kOp, "cos", cos),
         device_tensor(kOp, "sin", sin),
         device_tensor(kOp, "y", y),
         interleaved,
         backward};
  p.cos = broadcast(p.cos, p.x), p.sin = broadcast(p.sin, p.x);
  run_op(rope, p, kernel, stream_of(stream));
}

py::array run_numpy(py::handle x, py::handle cos, py::handle sin, bool interleaved, bool backward,
                    const char* kernel) {
  HostCall call(kOp);
  Rope p;
  p.x = call.upload("x", x), p.interleaved = interleaved, p.backward = backward;
  p.cos = broadcast(call.upload("cos", cos), p.x), p.sin = broadcast(call.upload("sin", sin), p.x);
  p.y = call.output(shape_of(p.x), dtype_of(x));
  run_op(rope, p, kernel, nullptr);
  return call.download(p.y);
}

}  // namespace

PYBIND11_MODULE(_ops_rope, m) {
  m.doc() = "Rotary position embedding on CUDA, with its gradient.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(rope_rows()); }, "[(name, range)] of the kernels.");
  m.def(
      "forward",
      [](py::handle x, py::handle cos, py::handle sin, py::handle y, bool interleaved,
         std::uintptr_t stream,
         const char* kernel) { run(x, cos, sin, y, interleaved, false, stream, kernel); },
      py::arg("x"), py::arg("cos"), py::arg("sin"), py::kw_only(), py::arg("y"),
      py::arg("interleaved") = false, py::arg("stream") = 0, py::arg("kernel") = "",
      "y = x cos + rotate(x) sin. DLPack tensors on the device: x, y [B, H, S, D] float32, "
      "bfloat16 "
      "or\nfloat16, any strides with a dense last axis (y may be x); cos, sin broadcast to x, of "
      "x's "
      "dtype or\nfloat32. rotate: [-x2, x1] of the halves, or of neighbouring pairs "
      "(interleaved). On `stream`.\nRaises InvalidArgument, Unsupported, NoDevice, DeviceError.");
  m.def(
      "backward",
      [](py::handle dy, py::handle cos, py::handle sin, py::handle dx, bool interleaved,
         std::uintptr_t stream,
         const char* kernel) { run(dy, cos, sin, dx, interleaved, true, stream, kernel); },
      py::arg("dy"), py::arg("cos"), py::arg("sin"), py::kw_only(), py::arg("dx"),
      py::arg("interleaved") = false, py::arg("stream") = 0, py::arg("kernel") = "",
      "dx from dy; dx may be dy.");
  m.def(
      "forward_numpy",
      [](py::handle x, py::handle cos, py::handle sin, bool interleaved, const char* kernel) {
        return run_numpy(x, cos, sin, interleaved, false, kernel);
      },
      py::arg("x"), py::arg("cos"), py::arg("sin"), py::kw_only(), py::arg("interleaved") = false,
      py::arg("kernel") = "", "forward over host arrays; bfloat16 is uint16 bit patterns.");
  m.def(
      "backward_numpy",
      [](py::handle dy, py::handle cos, py::handle sin, bool interleaved, const char* kernel) {
        return run_numpy(dy, cos, sin, interleaved, true, kernel);
      },
      py::arg("dy"), py::arg("cos"), py::arg("sin"), py::kw_only(), py::arg("interleaved") = false,
      py::arg("kernel") = "", "backward over host arrays: dx.");
}
