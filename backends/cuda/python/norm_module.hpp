// The Python functions of layernorm and rmsnorm: one set of sources, two modules.
#pragma once

#include "module_kit.hpp"
#include "norm/api.hpp"

namespace rm::ops_bindings {

inline void add_norm(py::module_& m, cuda_ops::Norm kind, const char* op) {
  using namespace cuda_ops;
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(norm_forward_rows()); },
      "[(name, range)] of the forward kernels.");
  m.def(
      "backward_kernels", [] { return describe(norm_backward_rows()); },
      "[(name, range)] of the backward kernels.");

  m.def(
      "forward",
      [kind, op](py::handle x, py::handle weight, py::handle bias, py::handle residual,
                 py::handle y, py::handle sum, float eps, float weight_offset,
                 std::uintptr_t stream, const char* kernel) {
        const OptionalTensor w(op, "weight", weight), b(op, "bias", bias),
            r(op, "residual", residual), s(op, "sum", sum);
        run_op(norm_forward,
               {kind, device_tensor(op, "x", x), device_tensor(op, "y", y), w.get(), b.get(),
                r.get(), s.get(), eps, weight_offset},
               kernel, stream_of(stream));
      },
      py::arg("x"), py::arg("weight") = py::none(), py::arg("bias") = py::none(),
      py::arg("residual") = py::none(), py::kw_only(), py::arg("y"), py::arg("sum") = py::none(),
      py::arg("eps") = 1e-5f, py::arg("weight_offset") = 0.0f, py::arg("stream") = 0,
      py::arg("kernel") = "",
      "h = x + residual; y = norm(h) * (weight + weight_offset) + bias; sum = h. DLPack tensors on "
      "the device:\n"
      "x, residual, y, sum [*, N] of float32, bfloat16 or float16, any row pitch; weight, bias [N] "
      "of the\n"
      "same dtype. Runs on `stream` (a cudaStream_t as an integer) without copies or "
      "synchronisation.\n"
      "Raises InvalidArgument, Unsupported (an unknown or unfit `kernel`), NoDevice, DeviceError.");

  m.def(
      "backward_workspace",
      [kind, op](py::handle h, bool wants_weight_gradients) -> std::size_t {
        NormBackward p;
        p.kind = kind;
        p.h = device_tensor(op, "h", h);
        if (wants_weight_gradients) p.dweight = &p.h;
        return norm_backward_workspace(p);
      },
      py::arg("h"), py::arg("wants_weight_gradients") = true, "Bytes that backward needs.");

  m.def(
      "backward",
      [kind, op](py::handle dy, py::handle h, py::handle weight, py::handle dsum, py::handle dx,
                 py::handle dweight, py::handle dbias, py::handle workspace, float eps,
                 float weight_offset, std::uintptr_t stream, const char* kernel) {
        const OptionalTensor w(op, "weight", weight), ds(op, "dsum", dsum),
            dw(op, "dweight", dweight), db(op, "dbias", dbias);
        run_op(norm_backward,
               {kind, device_tensor(op, "dy", dy), device_tensor(op, "h", h),
                device_tensor(op, "dx", dx), w.get(), ds.get(), dw.get(), db.get(), eps,
                weight_offset},
               kernel, workspace_of(op, workspace), stream_of(stream));
      },
      py::arg("dy"), py::arg("h"), py::arg("weight") = py::none(), py::arg("dsum") = py::none(),
      py::kw_only(), py::arg("dx"), py::arg("dweight") = py::none(), py::arg("dbias") = py::none(),
      py::arg("workspace") = py::none(), py::arg("eps") = 1e-5f, py::arg("weight_offset") = 0.0f,
      py::arg("stream") = 0, py::arg("kernel") = "",
      "Gradients from dy and h (what was normalised): dx (of x and of the residual; dsum is "
      "added),\n"
      "dweight and dbias where given, summed in a fixed order. `workspace`: backward_workspace() "
      "bytes.");

  m.def(
      "forward_numpy",
      [kind, op](py::handle x, py::handle weight, py::handle bias, py::handle residual, float eps,
                 float weight_offset, bool return_sum, const char* kernel) -> py::object {
        HostCall call(op);
        NormForward p;
        p.kind = kind, p.eps = eps, p.weight_offset = weight_offset;
        p.x = call.upload("x", x);
        p.weight = call.upload_optional("weight", weight),
        p.bias = call.upload_optional("bias", bias);
        p.residual = call.upload_optional("residual", residual);
        p.y = call.output(shape_of(p.x), dtype_of(x));
        if (return_sum) p.sum = call.keep(call.output(shape_of(p.x), dtype_of(x)));
        run_op(norm_forward, p, kernel, nullptr);
        if (!return_sum) return call.download(p.y);
        return py::make_tuple(call.download(p.y), call.download(*p.sum));
      },
      py::arg("x"), py::arg("weight") = py::none(), py::arg("bias") = py::none(),
      py::arg("residual") = py::none(), py::kw_only(), py::arg("eps") = 1e-5f,
      py::arg("weight_offset") = 0.0f, py::arg("return_sum") = false, py::arg("kernel") = "",
      "forward over host arrays: y, or (y, sum). bfloat16 is uint16 bit patterns. Errors as "
      "forward.");

  m.def(
      "backward_numpy",
      [kind, op](py::handle dy, py::handle h, py::handle weight, bool has_bias, float eps,
                 float weight_offset, const char* kernel) {
        HostCall call(op);
        NormBackward p;
        p.kind = kind, p.eps = eps, p.weight_offset = weight_offset;
        p.dy = call.upload("dy", dy), p.h = call.upload("h", h);
        p.weight = call.upload_optional("weight", weight);
        p.dx = call.output(shape_of(p.h), dtype_of(h));
        const std::vector<py::ssize_t> n = {
            p.h.rank ? static_cast<py::ssize_t>(p.h.shape[p.h.rank - 1]) : 1};
        if (p.weight) p.dweight = call.keep(call.output(n, dtype_of(h)));
        if (has_bias) p.dbias = call.keep(call.output(n, dtype_of(h)));
        run_op(norm_backward, p, kernel, call.workspace(norm_backward_workspace(p)), nullptr);
        return py::make_tuple(call.download(p.dx),
                              p.dweight ? py::object(call.download(*p.dweight)) : py::none(),
                              p.dbias ? py::object(call.download(*p.dbias)) : py::none());
      },
      py::arg("dy"), py::arg("h"), py::arg("weight") = py::none(), py::kw_only(),
      py::arg("has_bias") = false, py::arg("eps") = 1e-5f, py::arg("weight_offset") = 0.0f,
      py::arg("kernel") = "", "backward over host arrays: (dx, dweight or None, dbias or None).");
}

}  // namespace rm::ops_bindings
