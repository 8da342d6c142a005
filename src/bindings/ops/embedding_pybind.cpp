// rm_abstract.ops._ops_embedding
#include "embedding/api.hpp"
#include "module_kit.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "embedding";

void forward(py::handle table, py::handle ids, py::handle y, std::uintptr_t stream,
             const char* kernel) {
  check(embedding_forward({device_tensor(kOp, "table", table), device_tensor(kOp, "ids", ids),
                           device_tensor(kOp, "y", y)},
                          kernel, stream_of(stream)));
}

void backward(py::handle dy, py::handle ids, py::handle dtable, py::handle workspace,
              std::uintptr_t stream, const char* kernel) {
  check(embedding_backward({device_tensor(kOp, "dy", dy), device_tensor(kOp, "ids", ids),
                            device_tensor(kOp, "dtable", dtable)},
                           kernel, workspace_of(kOp, workspace), stream_of(stream)));
}

std::size_t backward_workspace(py::handle ids) {
  EmbeddingBackward p;
  p.ids = device_tensor(kOp, "ids", ids);
  return embedding_backward_workspace(p);
}

py::array forward_numpy(py::handle table, py::handle ids, const char* kernel) {
  HostCall call(kOp);
  EmbeddingForward p;
  p.table = call.upload("table", table), p.ids = call.upload("ids", ids);
  std::vector<py::ssize_t> shape = shape_of(p.ids);
  shape.push_back(p.table.rank > 0 ? p.table.shape[p.table.rank - 1] : 1);
  p.y = call.output(shape, dtype_of(table));
  check(embedding_forward(p, kernel, nullptr));
  return call.download(p.y);
}

py::array backward_numpy(py::handle dy, py::handle ids, py::ssize_t vocabulary,
                         const char* kernel) {
  HostCall call(kOp);
  EmbeddingBackward p;
  p.dy = call.upload("dy", dy), p.ids = call.upload("ids", ids);
  const py::ssize_t n = p.dy.rank > 0 ? static_cast<py::ssize_t>(p.dy.shape[p.dy.rank - 1]) : 1;
  p.dtable = call.output({vocabulary, n}, dtype_of(dy));
  check(embedding_backward(p, kernel, call.workspace(embedding_backward_workspace(p)), nullptr));
  return call.download(p.dtable);
}

}  // namespace

PYBIND11_MODULE(_ops_embedding, m) {
  m.doc() = "Rows of a table by their ids on CUDA, with the table's gradient.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(embedding_forward_rows()); },
      "[(name, range)] of the forward kernels.");
  m.def(
      "backward_kernels", [] { return describe(embedding_backward_rows()); },
      "[(name, range)] of the backward kernels.");
  m.def("forward", forward, py::arg("table"), py::arg("ids"), py::kw_only(), py::arg("y"),
        py::arg("stream") = 0, py::arg("kernel") = "",
        "y[i] = table[ids[i]]. DLPack tensors on the device: table [V, N] float32, bfloat16 or "
        "float16,\ndense rows; ids [*] int32 or int64, y [*, N], dense. An id outside the table "
        "gives a row of NaN and\nreads nothing. On `stream`. Raises InvalidArgument, Unsupported, "
        "NoDevice, DeviceError.");
  m.def("backward_workspace", backward_workspace, py::arg("ids"), "Bytes that backward needs.");
  m.def(
      "backward", backward, py::arg("dy"), py::arg("ids"), py::kw_only(), py::arg("dtable"),
      py::arg("workspace") = py::none(), py::arg("stream") = 0, py::arg("kernel") = "",
      "dtable [V, N] (overwritten): the rows of dy added where their ids point, in a fixed order.");
  m.def("forward_numpy", forward_numpy, py::arg("table"), py::arg("ids"), py::kw_only(),
        py::arg("kernel") = "", "forward over host arrays; bfloat16 is uint16 bit patterns.");
  m.def("backward_numpy", backward_numpy, py::arg("dy"), py::arg("ids"), py::kw_only(),
        py::arg("vocabulary"), py::arg("kernel") = "", "backward over host arrays: dtable.");
}
