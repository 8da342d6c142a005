// rm_abstract.ops._ops_gemm
#include <pybind11/stl.h>

#include "epilogue_arguments.hpp"
#include "gemm/api.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "gemm";

/// Where pip puts cuBLAS, for a process in which nothing has loaded it yet.
std::vector<std::string> library_paths() {
  std::vector<std::string> out;
  const py::object find = py::module_::import("importlib.util").attr("find_spec");
  const py::object spec = find("nvidia");
  if (spec.is_none() || spec.attr("submodule_search_locations").is_none()) return out;
  for (const py::handle root : spec.attr("submodule_search_locations")) {
    const auto base = py::cast<std::string>(root);
    out.push_back(base + "/cu13/lib/libcublasLt.so.13");
    out.push_back(base + "/cublas/lib/libcublasLt.so.12");
  }
  return out;
}

/// Lives as long as the process: graphs and kernels may outlast the module.
GemmLibrary* library() {
  static GemmLibrary* const known = new GemmLibrary(library_paths());
  return known;
}

struct Options {
  bool trans_a, trans_b, tf32, tune;
};

Gemm problem(py::handle a, py::handle b, const Options& o) {
  Gemm p;
  p.a = device_tensor(kOp, "a", a), p.b = device_tensor(kOp, "b", b);
  p.trans_a = o.trans_a, p.trans_b = o.trans_b, p.tf32 = o.tf32, p.tune = o.tune;
  p.library = library();
  return p;
}

void forward(py::handle a, py::handle b, py::handle bias, py::handle residual, py::handle c,
             py::handle aux, bool trans_a, bool trans_b, bool tf32, const std::string& bias_kind,
             const std::string& activation, float slope, float scale, bool stable_weights,
             bool overlap, py::handle workspace, bool tune, std::uintptr_t stream,
             const char* kernel) {
  const OptionalTensor v(kOp, "bias", bias), r(kOp, "residual", residual), x(kOp, "aux", aux);
  Gemm p = problem(a, b, {trans_a, trans_b, tf32, tune});
  p.c = device_tensor(kOp, "c", c);
  p.stable_weights = stable_weights, p.overlap = overlap;
  p.epilogue = epilogue_of(kOp, v.get(), bias_kind, activation, slope, scale);
  p.epilogue.bias = v.get(), p.epilogue.residual = r.get(), p.epilogue.aux = x.get();
  run_op(gemm, p, kernel, workspace_of(kOp, workspace), stream_of(stream));
}

GemmBackward backward_problem(py::handle dc, py::handle a, py::handle b, const Options& o,
                              bool has_bias, const std::string& bias_kind,
                              const std::string& activation, float slope, float scale) {
  GemmBackward p;
  p.dc = device_tensor(kOp, "dc", dc);
  p.a = device_tensor(kOp, "a", a), p.b = device_tensor(kOp, "b", b);
  p.trans_a = o.trans_a, p.trans_b = o.trans_b, p.tf32 = o.tf32, p.tune = o.tune;
  p.library = library();
  p.epilogue = epilogue_of(kOp, has_bias, bias_kind, activation, slope, scale);
  return p;
}

void backward(py::handle dc, py::handle a, py::handle b, py::handle aux, py::handle da,
              py::handle db, py::handle dbias, bool trans_a, bool trans_b, bool tf32,
              const std::string& bias_kind, const std::string& activation, float slope, float scale,
              py::handle workspace, bool tune, std::uintptr_t stream, const char* kernel) {
  const OptionalTensor x(kOp, "aux", aux), ga(kOp, "da", da), gb(kOp, "db", db),
      gv(kOp, "dbias", dbias);
  GemmBackward p = backward_problem(dc, a, b, {trans_a, trans_b, tf32, tune}, gv.get(), bias_kind,
                                    activation, slope, scale);
  p.epilogue.aux = x.get(), p.da = ga.get(), p.db = gb.get(), p.dbias = gv.get();
  run_op(gemm_backward, p, kernel, workspace_of(kOp, workspace), stream_of(stream));
}

std::size_t backward_workspace(py::handle dc, py::handle a, py::handle b, bool has_bias,
                               const std::string& bias_kind, const std::string& activation) {
  GemmBackward p = backward_problem(dc, a, b, {}, has_bias, bias_kind, activation, 0, 1);
  if (has_bias) p.dbias = &p.dc;
  return gemm_backward_workspace(p);
}

std::vector<py::ssize_t> result_shape(const Tensor& a, const Tensor& b, bool ta, bool tb) {
  std::vector<py::ssize_t> shape = shape_of(a);
  if (a.rank < 2 || b.rank < 2) return shape;  // forward will say what is wrong
  shape[shape.size() - 2] = a.shape[a.rank - (ta ? 1 : 2)];
  shape[shape.size() - 1] = b.shape[b.rank - (tb ? 2 : 1)];
  return shape;
}

py::object forward_numpy(py::handle a, py::handle b, py::handle bias, py::handle residual,
                         bool trans_a, bool trans_b, bool tf32, const std::string& bias_kind,
                         const std::string& activation, float slope, float scale, bool return_aux,
                         const char* kernel) {
  HostCall call(kOp);
  Gemm p;
  p.a = call.upload("a", a), p.b = call.upload("b", b);
  p.trans_a = trans_a, p.trans_b = trans_b, p.tf32 = tf32, p.library = library();
  p.epilogue = epilogue_of(kOp, !bias.is_none(), bias_kind, activation, slope, scale);
  p.epilogue.bias = call.upload_optional("bias", bias);
  p.epilogue.residual = call.upload_optional("residual", residual);
  const auto shape = result_shape(p.a, p.b, trans_a, trans_b);
  p.c = call.output(shape, dtype_of(a));
  if (return_aux) p.epilogue.aux = call.keep(call.output(shape, dtype_of(a)));
  run_op(gemm, p, kernel, call.workspace(gemm_workspace(p)), nullptr);
  if (!return_aux) return call.download(p.c);
  return py::make_tuple(call.download(p.c), call.download(*p.epilogue.aux));
}

py::tuple backward_numpy(py::handle dc, py::handle a, py::handle b, py::handle aux, bool trans_a,
                         bool trans_b, bool tf32, bool has_bias, const std::string& bias_kind,
                         const std::string& activation, float slope, float scale) {
  HostCall call(kOp);
  GemmBackward p;
  p.dc = call.upload("dc", dc), p.a = call.upload("a", a), p.b = call.upload("b", b);
  p.trans_a = trans_a, p.trans_b = trans_b, p.tf32 = tf32, p.library = library();
  p.epilogue = epilogue_of(kOp, has_bias, bias_kind, activation, slope, scale);
  p.epilogue.aux = call.upload_optional("aux", aux);
  p.da = call.keep(call.output(shape_of(p.a), dtype_of(a)));
  p.db = call.keep(call.output(shape_of(p.b), dtype_of(b)));
  const int rank = p.dc.rank;
  if (has_bias && rank >= 2) {
    const bool scalar = p.epilogue.bias_kind == BiasKind::scalar;
    const auto n = p.dc.shape[rank - (p.epilogue.bias_kind == BiasKind::row ? 2 : 1)];
    p.dbias = call.keep(call.output({scalar ? 1 : static_cast<py::ssize_t>(n)}, dtype_of(dc)));
  }
  run_op(gemm_backward, p, "", call.workspace(gemm_backward_workspace(p)), nullptr);
  return py::make_tuple(call.download(*p.da), call.download(*p.db),
                        p.dbias ? py::object(call.download(*p.dbias)) : py::none());
}

const std::string kForward =
    std::string(
        "c = epilogue(op(a) op(b)). DLPack tensors on the device, float32, bfloat16 or "
        "float16, last\naxes dense: a [.., M, K] (trans_a: [.., K, M]), b [.., K, N] or "
        "[K, N] (trans_b: [.., N, K]),\nc [.., M, N]. ") +
    kEpilogueText +
    "\ntf32: fp32 operands may lose mantissa bits. tune: the first call of a problem outside a "
    "capture\ntimes what could run it (c is written several times) and remembers. overlap, with "
    "stable_weights: as in\ngemv, of b and bias. `workspace`: workspace()\nbytes; less leaves "
    "algorithms out. On `stream`. Raises InvalidArgument, "
    "Unsupported, NoDevice,\nDeviceError.";

}  // namespace

PYBIND11_MODULE(_ops_gemm, m) {
  m.doc() = "Matrix products on CUDA with bias, activation and residual fused, and gradients.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(gemm_rows()); }, "[(name, range)] of the kernels.");
  m.def("backward_kernels", gemm_pair_rows,
        "[(name, range)] of the ways to make da and db: in one launch, or apart.");
  m.def(
      "library",
      [] {
        const char* why = library()->why_not();
        return py::make_tuple(library()->version(), why ? py::object(py::str(why)) : py::none());
      },
      "(version of cuBLASLt, why it is not used or None).");
  m.def(
      "workspace",
      [] {
        Gemm p;
        p.library = library();
        return gemm_workspace(p);
      },
      "Bytes that let every kernel run.");
  m.def("forward", forward, py::arg("a"), py::arg("b"), py::arg("bias") = py::none(),
        py::arg("residual") = py::none(), py::kw_only(), py::arg("c"), py::arg("aux") = py::none(),
        py::arg("trans_a") = false, py::arg("trans_b") = false, py::arg("tf32") = false,
        py::arg("bias_kind") = "column", py::arg("activation") = "none", py::arg("slope") = 0.01f,
        py::arg("scale") = 1.0f, py::arg("stable_weights") = false, py::arg("overlap") = false,
        py::arg("workspace") = py::none(), py::arg("tune") = false, py::arg("stream") = 0,
        py::arg("kernel") = "", kForward.c_str());
  m.def("backward_workspace", backward_workspace, py::arg("dc"), py::arg("a"), py::arg("b"),
        py::kw_only(), py::arg("has_bias") = false, py::arg("bias_kind") = "column",
        py::arg("activation") = "none", "Bytes that backward needs, the products' included.");
  m.def("backward", backward, py::arg("dc"), py::arg("a"), py::arg("b"),
        py::arg("aux") = py::none(), py::kw_only(), py::arg("da") = py::none(),
        py::arg("db") = py::none(), py::arg("dbias") = py::none(), py::arg("trans_a") = false,
        py::arg("trans_b") = false, py::arg("tf32") = false, py::arg("bias_kind") = "column",
        py::arg("activation") = "none", py::arg("slope") = 0.01f, py::arg("scale") = 1.0f,
        py::arg("workspace") = py::none(), py::arg("tune") = false, py::arg("stream") = 0,
        py::arg("kernel") = "",
        "Gradients da, db, dbias (where given) of forward with the same options; aux as forward "
        "stored it,\nneeded with an activation. The residual's gradient is dc. Sums have a fixed "
        "order in our kernels.");
  m.def("forward_numpy", forward_numpy, py::arg("a"), py::arg("b"), py::arg("bias") = py::none(),
        py::arg("residual") = py::none(), py::kw_only(), py::arg("trans_a") = false,
        py::arg("trans_b") = false, py::arg("tf32") = false, py::arg("bias_kind") = "column",
        py::arg("activation") = "none", py::arg("slope") = 0.01f, py::arg("scale") = 1.0f,
        py::arg("return_aux") = false, py::arg("kernel") = "",
        "forward over host arrays: c, or (c, aux); bfloat16 is uint16 bit patterns.");
  m.def("backward_numpy", backward_numpy, py::arg("dc"), py::arg("a"), py::arg("b"),
        py::arg("aux") = py::none(), py::kw_only(), py::arg("trans_a") = false,
        py::arg("trans_b") = false, py::arg("tf32") = false, py::arg("has_bias") = false,
        py::arg("bias_kind") = "column", py::arg("activation") = "none", py::arg("slope") = 0.01f,
        py::arg("scale") = 1.0f, "backward over host arrays: (da, db, dbias or None).");
}
