// rm_abstract.ops._ops_sdpa
#include <pybind11/stl.h>

#include <cmath>

#include "module_kit.hpp"
#include "sdpa/api.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "sdpa";

/// None: 1 / sqrt(D).
float scale_of(const std::optional<float>& scale, const Tensor& q) {
  const auto dim = static_cast<float>(q.rank > 0 ? q.shape[q.rank - 1] : 1);
  return scale ? *scale : 1.0f / std::sqrt(dim);
}

Sdpa problem(py::handle q, py::handle k, py::handle v) {
  Sdpa p;
  p.q = device_tensor(kOp, "q", q), p.k = device_tensor(kOp, "k", k);
  p.v = device_tensor(kOp, "v", v);
  return p;
}

void forward(py::handle q, py::handle k, py::handle v, py::handle mask, py::handle o,
             py::handle lse, py::handle lengths, const std::optional<float>& scale, bool causal,
             std::int64_t causal_offset, bool overlap, py::handle workspace, std::uintptr_t stream,
             const char* kernel) {
  const OptionalTensor m(kOp, "mask", mask), l(kOp, "lse", lse), n(kOp, "lengths", lengths);
  Sdpa p = problem(q, k, v);
  p.o = device_tensor(kOp, "o", o);
  p.mask = m.get(), p.lse = l.get(), p.lengths = n.get();
  p.scale = scale_of(scale, p.q), p.causal = causal, p.causal_offset = causal_offset;
  p.overlap = overlap;
  run_op(sdpa, p, kernel, workspace_of(kOp, workspace), stream_of(stream));
}

void step(py::handle q, py::handle k_new, py::handle v_new, py::handle cos, py::handle sin,
          py::handle position, py::handle k, py::handle v, py::handle o, py::handle mask,
          const std::optional<float>& scale, bool ends, bool overlap, bool stable_caches,
          py::handle workspace, std::uintptr_t stream, const char* kernel) {
  const OptionalTensor m(kOp, "mask", mask), c(kOp, "cos", cos), t(kOp, "sin", sin);
  SdpaStep p;
  p.s = problem(q, k, v);
  p.s.o = device_tensor(kOp, "o", o), p.s.mask = m.get(), p.s.scale = scale_of(scale, p.s.q);
  p.k_new = device_tensor(kOp, "k_new", k_new), p.v_new = device_tensor(kOp, "v_new", v_new);
  p.cos = c.get(), p.sin = t.get();
  p.position = device_tensor(kOp, "position", position);
  p.ends = ends, p.overlap = overlap, p.stable_caches = stable_caches;
  run_op(sdpa_step, p, kernel, workspace_of(kOp, workspace), stream_of(stream));
}

std::size_t workspace(py::handle q, py::handle k) {
  Sdpa p = problem(q, k, k);
  p.o = p.q;
  return sdpa_workspace(p);
}

py::tuple forward_numpy(py::handle q, py::handle k, py::handle v, py::handle mask,
                        py::handle lengths, const std::optional<float>& scale, bool causal,
                        std::int64_t causal_offset, const char* kernel) {
  HostCall call(kOp);
  Sdpa p;
  p.q = call.upload("q", q), p.k = call.upload("k", k), p.v = call.upload("v", v);
  p.mask = call.upload_optional("mask", mask), p.lengths = call.upload_optional("lengths", lengths);
  p.scale = scale_of(scale, p.q), p.causal = causal, p.causal_offset = causal_offset;
  p.o = call.output(shape_of(p.q), dtype_of(q));
  std::vector<py::ssize_t> rows = shape_of(p.q);
  if (!rows.empty()) rows.pop_back();
  p.lse = call.keep(call.output(rows, py::dtype::of<float>()));
  run_op(sdpa, p, kernel, call.workspace(sdpa_workspace(p)), nullptr);
  return py::make_tuple(call.download(p.o), call.download(*p.lse));
}

void backward(py::handle d_o, py::handle q, py::handle k, py::handle v, py::handle o,
              py::handle lse, py::handle mask, py::handle dq, py::handle dk, py::handle dv,
              py::handle lengths, const std::optional<float>& scale, bool causal,
              std::int64_t causal_offset, py::handle workspace, std::uintptr_t stream,
              const char* kernel) {
  const OptionalTensor m(kOp, "mask", mask), l(kOp, "lse", lse), n(kOp, "lengths", lengths);
  SdpaBackward p;
  p.f = problem(q, k, v);
  p.f.o = device_tensor(kOp, "o", o), p.d_o = device_tensor(kOp, "d_o", d_o);
  p.dq = device_tensor(kOp, "dq", dq), p.dk = device_tensor(kOp, "dk", dk);
  p.dv = device_tensor(kOp, "dv", dv);
  p.f.mask = m.get(), p.f.lse = l.get(), p.f.lengths = n.get();
  p.f.scale = scale_of(scale, p.f.q), p.f.causal = causal, p.f.causal_offset = causal_offset;
  run_op(sdpa_backward, p, kernel, workspace_of(kOp, workspace), stream_of(stream));
}

std::size_t backward_workspace(py::handle q, py::handle k) {
  SdpaBackward p;
  p.f = problem(q, k, k);
  return sdpa_backward_workspace(p);
}

py::tuple backward_numpy(py::handle d_o, py::handle q, py::handle k, py::handle v, py::handle o,
                         py::handle lse, py::handle mask, py::handle lengths,
                         const std::optional<float>& scale, bool causal, std::int64_t causal_offset,
                         const char* kernel) {
  HostCall call(kOp);
  SdpaBackward p;
  Sdpa& f = p.f;
  f.q = call.upload("q", q), f.k = call.upload("k", k), f.v = call.upload("v", v);
  f.o = call.upload("o", o), p.d_o = call.upload("d_o", d_o);
  f.lse = call.upload_optional("lse", lse), f.mask = call.upload_optional("mask", mask);
  f.lengths = call.upload_optional("lengths", lengths);
  f.scale = scale_of(scale, f.q), f.causal = causal, f.causal_offset = causal_offset;
  p.dq = call.output(shape_of(f.q), dtype_of(q)), p.dk = call.output(shape_of(f.k), dtype_of(k));
  p.dv = call.output(shape_of(f.v), dtype_of(v));
  run_op(sdpa_backward, p, kernel, call.workspace(sdpa_backward_workspace(p)), nullptr);
  return py::make_tuple(call.download(p.dq), call.download(p.dk), call.download(p.dv));
}

}  // namespace

PYBIND11_MODULE(_ops_sdpa, m) {
  m.doc() = "Scaled dot-product attention on CUDA: prefill and decoding, grouped heads, masks.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(sdpa_rows()); }, "[(name, range)] of the kernels.");
  m.def("step", step, py::arg("q"), py::arg("k_new"), py::arg("v_new"), py::arg("cos"),
        py::arg("sin"), py::arg("position"), py::arg("k"), py::arg("v"), py::kw_only(),
        py::arg("o"), py::arg("mask") = py::none(), py::arg("scale") = py::none(),
        py::arg("ends") = false, py::arg("overlap") = false, py::arg("stable_caches") = false,
        py::arg("workspace") = py::none(), py::arg("stream") = 0, py::arg("kernel") = "",
        "A step of decoding: q [B, H, 1, D] and k_new [B, G, 1, D] are rotated by halves with cos, "
        "sin\n[B, 1, 1, D] (None: they are not), k_new and v_new written into k, v [B, G, T, D] at position [1], and o "
        "is attention of\nthe rotated q to them, under the mask, up to the position where `ends`. "
        "workspace(q, k) bytes. overlap: as forward's; with stable_caches rows of the caches but the "
        "position's\nmay be read early: what wrote them lies behind something that started only after "
        "all before it had ended.");
  m.def("workspace", workspace, py::arg("q"), py::arg("k"), "Bytes that forward needs.");
  m.def("forward", forward, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("mask") = py::none(),
        py::kw_only(), py::arg("o"), py::arg("lse") = py::none(), py::arg("lengths") = py::none(),
        py::arg("scale") = py::none(), py::arg("causal") = false, py::arg("causal_offset") = 0,
        py::arg("overlap") = false, py::arg("workspace") = py::none(), py::arg("stream") = 0,
        py::arg("kernel") = "",
        "o = softmax(scale q k^T + mask) v. DLPack tensors on the device, float32, bfloat16 or "
        "float16:\nq, o [B, H, S, D], k, v [B, G, T, D] with H a multiple of G, any strides with a "
        "dense last axis.\nmask [B, H, S, T] (expand to it): bool, true = attend, or q's dtype, "
        "added. lengths [B]: keys of\neach batch. causal: query i sees keys j <= i + "
        "causal_offset. scale: default 1 / sqrt(D). lse\n[B, H, S] float32: log-sum-exp. A row "
        "without keys is 0. overlap: decoding's blocks may\nstart before the stream's previous "
        "kernel "
        "has ended; all operands are read after it. `workspace`:\nworkspace() bytes. "
        "On\n`stream`. Raises InvalidArgument, "
        "Unsupported, NoDevice, DeviceError.");
  m.def("forward_numpy", forward_numpy, py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("mask") = py::none(), py::kw_only(), py::arg("lengths") = py::none(),
        py::arg("scale") = py::none(), py::arg("causal") = false, py::arg("causal_offset") = 0,
        py::arg("kernel") = "",
        "forward over host arrays: (o, lse); bfloat16 is uint16 bit patterns.");
  m.def(
      "backward_kernels", [] { return describe(sdpa_backward_rows()); },
      "[(name, range)] of the gradient's kernels.");
  m.def("backward_workspace", backward_workspace, py::arg("q"), py::arg("k"),
        "Bytes that backward needs.");
  m.def("backward", backward, py::arg("d_o"), py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("o"), py::arg("lse"), py::arg("mask") = py::none(), py::kw_only(), py::arg("dq"),
        py::arg("dk"), py::arg("dv"), py::arg("lengths") = py::none(),
        py::arg("scale") = py::none(), py::arg("causal") = false, py::arg("causal_offset") = 0,
        py::arg("workspace") = py::none(), py::arg("stream") = 0, py::arg("kernel") = "",
        "dq [B, H, S, D], dk, dv [B, G, T, D] from d_o and the forward's operands and results o "
        "and lse. dk and\ndv sum over the heads of a group; all sums have a fixed order. The mask "
        "gets no gradient.\n`workspace`: backward_workspace() bytes. Errors as forward.");
  m.def("backward_numpy", backward_numpy, py::arg("d_o"), py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("o"), py::arg("lse"), py::arg("mask") = py::none(), py::kw_only(),
        py::arg("lengths") = py::none(), py::arg("scale") = py::none(), py::arg("causal") = false,
        py::arg("causal_offset") = 0, py::arg("kernel") = "",
        "backward over host arrays: (dq, dk, dv).");
}
