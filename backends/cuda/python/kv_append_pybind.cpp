// rm_abstract.ops._ops_kv_append
#include "kv_append/api.hpp"
#include "module_kit.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "kv_append";

void forward(py::handle k, py::handle v, py::handle k_cache, py::handle v_cache,
             py::handle positions, std::uintptr_t stream, const char* kernel) {
  run_op(kv_append,
         {device_tensor(kOp, "k", k), device_tensor(kOp, "v", v),
          device_tensor(kOp, "k_cache", k_cache), device_tensor(kOp, "v_cache", v_cache),
          device_tensor(kOp, "positions", positions)},
         kernel, stream_of(stream));
}

/// The array as an output of the call that starts as a copy of it.
Tensor changed(HostCall& call, const char* what, py::handle array) {
  const Tensor from = call.upload(what, array);
  const Tensor to = call.output(shape_of(from), dtype_of(array));
  const cudaError_t e =
      cudaMemcpy(to.data, from.data, static_cast<std::size_t>(numel(from)) * size_of(from.dtype),
                 cudaMemcpyDeviceToDevice);
  if (e != cudaSuccess) check({Code::device_error, "[kv_append] expected a copy, got an error"});
  return to;
}

py::tuple forward_numpy(py::handle k, py::handle v, py::handle k_cache, py::handle v_cache,
                        py::handle positions, const char* kernel) {
  HostCall call(kOp);
  KvAppend p;
  p.k = call.upload("k", k), p.v = call.upload("v", v);
  p.positions = call.upload("positions", positions);
  p.k_cache = changed(call, "k_cache", k_cache), p.v_cache = changed(call, "v_cache", v_cache);
  run_op(kv_append, p, kernel, nullptr);
  return py::make_tuple(call.download(p.k_cache), call.download(p.v_cache));
}

}  // namespace

PYBIND11_MODULE(_ops_kv_append, m) {
  m.doc() = "Writes new keys and values into their caches on CUDA.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(kv_append_rows()); }, "[(name, range)] of the kernels.");
  m.def("forward", forward, py::arg("k"), py::arg("v"), py::arg("k_cache"), py::arg("v_cache"),
        py::arg("positions"), py::kw_only(), py::arg("stream") = 0, py::arg("kernel") = "",
        "cache[b, g, positions[b] + s] = new[b, g, s] for keys and values. DLPack tensors on the "
        "device:\nk, v [B, G, S, D], caches [B, G, T, D] of one dtype (float32, bfloat16, "
        "float16), any strides with\na dense last axis, positions [B] int32 or int64. Positions "
        "outside the cache are not written. On\n`stream`. Raises InvalidArgument, Unsupported, "
        "NoDevice, DeviceError.");
  m.def("forward_numpy", forward_numpy, py::arg("k"), py::arg("v"), py::arg("k_cache"),
        py::arg("v_cache"), py::arg("positions"), py::kw_only(), py::arg("kernel") = "",
        "(k_cache, v_cache) with the rows written, from host arrays.");
}
