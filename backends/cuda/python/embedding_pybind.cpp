// rm_abstract.ops._ops_embedding
#include "_shim/dispatch_shim.hpp"
#include "embedding/api.hpp"
#include "module_kit.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "embedding";

void forward(py::handle table, py::handle ids, py::handle y, py::handle out_of_range,
             std::uintptr_t stream, const char* kernel) {
  const OptionalTensor flag(kOp, "out_of_range", out_of_range);
  run_op(embedding_forward,
         {device_tensor(kOp, "table", table), device_tensor(kOp, "ids", ids),
          device_tensor(kOp, "y", y), flag.get()},
         kernel, stream_of(stream));
}

void backward(py::handle dy, py::handle ids, py::handle dtable, py::handle out_of_range,
              py::handle workspace, std::uintptr_t stream, const char* kernel) {
  const OptionalTensor flag(kOp, "out_of_range", out_of_range);
  run_op(embedding_backward,
         {device_tensor(kOp, "dy", dy), device_tensor(kOp, "ids", ids),
          device_tensor(kOp, "dtable", dtable), flag.get()},
         kernel, workspace_of(kOp, workspace), stream_of(stream));
}

std::size_t backward_workspace(py::handle ids) {
  EmbeddingBackward p;
  p.ids = device_tensor(kOp, "ids", ids);
  return embedding_backward_workspace(p);
}

/// One int32 on the device, 0, for the kernels to set.
Tensor cleared_flag(HostCall& call) {
  const Tensor flag = call.output({1}, py::dtype::of<std::int32_t>());
  check(cuda_status(kOp, cudaMemset(flag.data, 0, 4), "a cleared flag"));
  return flag;
}

void check_flag(HostCall& call, const Tensor& flag, std::int64_t rows) {
  if (*static_cast<const std::int32_t*>(call.download(flag).data()) == 0) return;
  check(invalid("[embedding] expected ids from 0 to " + std::to_string(rows - 1) +
                ", got one outside; try clamping them or a table of more rows"));
}

py::array forward_numpy(py::handle table, py::handle ids, const char* kernel) {
  HostCall call(kOp);
  EmbeddingForward p;
  p.table = call.upload("table", table), p.ids = call.upload("ids", ids);
  std::vector<py::ssize_t> shape = shape_of(p.ids);
  shape.push_back(p.table.rank > 0 ? p.table.shape[p.table.rank - 1] : 1);
  p.y = call.output(shape, dtype_of(table));
  const Tensor flag = cleared_flag(call);
  p.out_of_range = &flag;
  run_op(embedding_forward, p, kernel, nullptr);
  check_flag(call, flag, p.table.shape[0]);
  return call.download(p.y);
}

py::array backward_numpy(py::handle dy, py::handle ids, py::ssize_t vocabulary,
                         const char* kernel) {
  HostCall call(kOp);
  EmbeddingBackward p;
  p.dy = call.upload("dy", dy), p.ids = call.upload("ids", ids);
  const py::ssize_t n = p.dy.rank > 0 ? static_cast<py::ssize_t>(p.dy.shape[p.dy.rank - 1]) : 1;
  p.dtable = call.output({vocabulary, n}, dtype_of(dy));
  const Tensor flag = cleared_flag(call);
  p.out_of_range = &flag;
  run_op(embedding_backward, p, kernel, call.workspace(embedding_backward_workspace(p)), nullptr);
  check_flag(call, flag, vocabulary);
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
        py::arg("out_of_range") = py::none(), py::arg("stream") = 0, py::arg("kernel") = "",
        "y[i] = table[ids[i]]. DLPack tensors on the device: table [V, N] float32, bfloat16 or "
        "float16,\ndense rows; ids [*] int32 or int64, y [*, N], dense. An id outside the table "
        "gives a row of NaN,\nreads nothing and sets out_of_range [1] int32 (where given) to 1: "
        "only the device sees the ids. On\n`stream`. Raises InvalidArgument, Unsupported, "
        "NoDevice, DeviceError.");
  m.def("backward_workspace", backward_workspace, py::arg("ids"), "Bytes that backward needs.");
  m.def(
      "backward", backward, py::arg("dy"), py::arg("ids"), py::kw_only(), py::arg("dtable"),
      py::arg("out_of_range") = py::none(), py::arg("workspace") = py::none(),
      py::arg("stream") = 0, py::arg("kernel") = "",
      "dtable [V, N] (overwritten): the rows of dy added where their ids point, in a fixed order; "
      "ids outside\nthe table add nothing and set out_of_range, as in forward.");
  m.def(
      "forward_numpy", forward_numpy, py::arg("table"), py::arg("ids"), py::kw_only(),
      py::arg("kernel") = "",
      "forward over host arrays; bfloat16 is uint16 bit patterns. Raises InvalidArgument where an "
      "id is\noutside the table.");
  m.def("backward_numpy", backward_numpy, py::arg("dy"), py::arg("ids"), py::kw_only(),
        py::arg("vocabulary"), py::arg("kernel") = "",
        "backward over host arrays: dtable. Raises as forward_numpy.");
}
