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
             std::int64_t causal_offset, py::handle workspace, std::uintptr_t stream,
             const char* kernel) {
  const OptionalTensor m(kOp, "mask", mask), l(kOp, "lse", lse), n(kOp, "lengths", lengths);
  Sdpa p = problem(q, k, v);
  p.o = device_tensor(kOp, "o", o);
  p.mask = m.get(), p.lse = l.get(), p.lengths = n.get();
  p.scale = scale_of(scale, p.q), p.causal = causal, p.causal_offset = causal_offset;
  check(sdpa(p, kernel, workspace_of(kOp, workspace), stream_of(stream)));
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
  check(sdpa(p, kernel, call.workspace(sdpa_workspace(p)), nullptr));
  return py::make_tuple(call.download(p.o), call.download(*p.lse));
}

}  // namespace

PYBIND11_MODULE(_ops_sdpa, m) {
  m.doc() = "Scaled dot-product attention on CUDA: prefill and decoding, grouped heads, masks.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(sdpa_rows()); }, "[(name, range)] of the kernels.");
  m.def("workspace", workspace, py::arg("q"), py::arg("k"), "Bytes that forward needs.");
  m.def("forward", forward, py::arg("q"), py::arg("k"), py::arg("v"), py::arg("mask") = py::none(),
        py::kw_only(), py::arg("o"), py::arg("lse") = py::none(), py::arg("lengths") = py::none(),
        py::arg("scale") = py::none(), py::arg("causal") = false, py::arg("causal_offset") = 0,
        py::arg("workspace") = py::none(), py::arg("stream") = 0, py::arg("kernel") = "",
        "o = softmax(scale q k^T + mask) v. DLPack tensors on the device, float32, bfloat16 or "
        "float16:\nq, o [B, H, S, D], k, v [B, G, T, D] with H a multiple of G, any strides with a "
        "dense last axis.\nmask [B, H, S, T] (expand to it): bool, true = attend, or q's dtype, "
        "added. lengths [B]: keys of\neach batch. causal: query i sees keys j <= i + "
        "causal_offset. scale: default 1 / sqrt(D). lse\n[B, H, S] float32: log-sum-exp. A row "
        "without keys is 0. `workspace`: workspace() bytes. On\n`stream`. Raises InvalidArgument, "
        "Unsupported, NoDevice, DeviceError.");
  m.def("forward_numpy", forward_numpy, py::arg("q"), py::arg("k"), py::arg("v"),
        py::arg("mask") = py::none(), py::kw_only(), py::arg("lengths") = py::none(),
        py::arg("scale") = py::none(), py::arg("causal") = false, py::arg("causal_offset") = 0,
        py::arg("kernel") = "",
        "forward over host arrays: (o, lse); bfloat16 is uint16 bit patterns.");
}
