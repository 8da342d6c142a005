// rm_abstract.ops._ops_copy
#include <pybind11/stl.h>

#include "copy/api.hpp"
#include "module_kit.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "copy";

void forward(py::handle x, py::handle y, std::uintptr_t stream, const char* kernel) {
  run_op(copy, {device_tensor(kOp, "x", x), device_tensor(kOp, "y", y)}, kernel, stream_of(stream));
}

/// The part of `whole` that `x` fills, from `start` along the axis.
Tensor part_of(const Tensor& whole, const Tensor& x, int axis, std::int64_t start) {
  Tensor t = whole;
  const std::int64_t size = x.rank == whole.rank ? x.shape[axis] : -1;
  if (size < 0 || start + size > whole.shape[axis]) {
    check(invalid("[copy] expected parts that fill y along the axis, got one that does not fit"));
  }
  t.data = static_cast<char*>(t.data) + start * t.stride[axis] * size_of(t.dtype);
  t.shape[axis] = size;
  return t;
}

void concat(const py::sequence& xs, int axis, py::handle y, std::uintptr_t stream,
            const char* kernel) {
  const Tensor whole = device_tensor(kOp, "y", y);
  if (axis < -whole.rank || axis >= whole.rank) {
    check(invalid("[copy] expected an axis of y, got " + std::to_string(axis)));
  }
  if (axis < 0) axis += whole.rank;
  std::int64_t start = 0;
  std::vector<Copy> parts;
  for (const py::handle item : xs) {
    const Tensor x = device_tensor(kOp, "a part", item);
    parts.push_back({x, part_of(whole, x, axis, start)});
    start += x.shape[axis];
  }
  if (start != whole.shape[axis]) {
    check(invalid("[copy] expected parts that fill y along the axis, got " + std::to_string(start) +
                  " of " + std::to_string(whole.shape[axis])));
  }
  run_op(copy_parts, parts, kernel, stream_of(stream));
}

py::array forward_numpy(py::handle x, std::vector<int> axes, const char* kernel) {
  HostCall call(kOp);
  const Tensor source = call.upload("x", x);
  Copy p{source, {}};
  if (axes.empty()) {
    for (int d = 0; d < source.rank; ++d) axes.push_back(d);
  }
  std::vector<py::ssize_t> shape;
  for (const int a : axes) {
    if (a < 0 || a >= source.rank || static_cast<int>(axes.size()) != source.rank) {
      check(invalid("[copy] expected axes that permute x's, got another list"));
    }
    p.x.shape[shape.size()] = source.shape[a], p.x.stride[shape.size()] = source.stride[a];
    shape.push_back(source.shape[a]);
  }
  p.y = call.output(shape, dtype_of(x));
  run_op(copy, p, kernel, nullptr);
  return call.download(p.y);
}

}  // namespace

PYBIND11_MODULE(_ops_copy, m) {
  m.doc() = "Copies between any strides on CUDA: slices, permutations, concatenation.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(copy_rows()); }, "[(name, range)] of the kernels.");
  m.def("forward", forward, py::arg("x"), py::kw_only(), py::arg("y"), py::arg("stream") = 0,
        py::arg("kernel") = "",
        "y = x. DLPack tensors on the device of one shape and dtype (any dtype), any strides: a "
        "slice, a\npermutation, an expansion (stride 0, x only). On `stream`, without "
        "synchronisation. Raises\nInvalidArgument, Unsupported, NoDevice, DeviceError.");
  m.def(
      "concat", concat, py::arg("xs"), py::arg("axis"), py::kw_only(), py::arg("y"),
      py::arg("stream") = 0, py::arg("kernel") = "",
      "y = the parts one after the other along the axis; one launch for 8 parts that go in 16-byte "
      "vectors,\nelse a launch a part.");
  m.def("forward_numpy", forward_numpy, py::arg("x"), py::kw_only(),
        py::arg("axes") = std::vector<int>{}, py::arg("kernel") = "",
        "numpy.transpose(x, axes) as a dense array, moved on the device.");
}
