// rm_abstract.ops._ops_ewise
#include <pybind11/stl.h>

#include "ewise/api.hpp"
#include "module_kit.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "ewise";

EwiseProgram program_of(const std::vector<int>& code, const std::vector<double>& imm) {
  if (code.size() % 5 != 0) {
    check(
        invalid("[ewise] expected 5 integers an instruction, got " + std::to_string(code.size())));
  }
  EwiseProgram p;
  p.imm = imm;
  for (std::size_t i = 0; i < code.size(); i += 5) {
    p.code.push_back({code[i], code[i + 1], code[i + 2], code[i + 3], code[i + 4]});
  }
  return p;
}

/// The operand as numpy broadcasts it to y's shape.
Tensor broadcast(const Tensor& t, const Tensor& y) {
  Tensor out = t;
  out.rank = y.rank;
  for (int d = 0; d < y.rank; ++d) {
    const int from = d - (y.rank - t.rank);
    const std::int64_t size = from < 0 ? 1 : t.shape[from];
    if (t.rank > y.rank || (size != 1 && size != y.shape[d])) {
      check(invalid("[ewise] expected operands that broadcast to y's shape, got " +
                    std::to_string(size) + " against " + std::to_string(y.shape[d]) +
                    "; try expand"));
    }
    out.shape[d] = y.shape[d];
    out.stride[d] = size == 1 ? 0 : t.stride[from];
    if (size == 1 && y.shape[d] == 1) out.stride[d] = 1;
  }
  return out;
}

void forward(const std::vector<int>& code, const std::vector<double>& imm,
             const py::sequence& operands, py::handle y, std::uintptr_t stream,
             const char* kernel) {
  Ewise p{program_of(code, imm), {}, device_tensor(kOp, "y", y)};
  for (const py::handle o : operands)
    p.operands.push_back(broadcast(device_tensor(kOp, "an operand", o), p.y));
  run_op(ewise, p, kernel, stream_of(stream));
}

std::vector<py::ssize_t> broadcast_shape(const std::vector<Tensor>& tensors) {
  std::vector<py::ssize_t> shape;
  for (const Tensor& t : tensors) {
    if (shape.size() < static_cast<std::size_t>(t.rank)) {
      shape.insert(shape.begin(), static_cast<std::size_t>(t.rank) - shape.size(), 1);
    }
    for (int d = 0; d < t.rank; ++d) {
      auto& s =
          shape[shape.size() - static_cast<std::size_t>(t.rank) + static_cast<std::size_t>(d)];
      if (s == 1) s = t.shape[d];
    }
  }
  return shape;
}

py::array forward_numpy(const std::vector<int>& code, const std::vector<double>& imm,
                        const py::sequence& operands, const py::dtype& dtype, const char* kernel) {
  HostCall call(kOp);
  Ewise p{program_of(code, imm), {}, {}};
  std::vector<Tensor> given;
  for (const py::handle o : operands) given.push_back(call.upload("an operand", o));
  p.y = call.output(broadcast_shape(given), dtype);
  for (const Tensor& t : given) p.operands.push_back(broadcast(t, p.y));
  run_op(ewise, p, kernel, nullptr);
  return call.download(p.y);
}

py::tuple gradient(const std::vector<int>& code, const std::vector<double>& imm, int operands,
                   int operand) {
  EwiseProgram out;
  if (operand < 0 || operand >= operands)
    check(invalid("[ewise] expected an operand's index below their number"));
  check(ewise_gradient(program_of(code, imm), operands, operand, &out));
  std::vector<int> flat;
  for (const auto& in : out.code) flat.insert(flat.end(), {in.opcode, in.cls, in.a, in.b, in.c});
  return py::make_tuple(flat, out.imm);
}

py::list backward_numpy(const std::vector<int>& code, const std::vector<double>& imm,
                        const py::sequence& operands, py::handle dy, const char* kernel) {
  py::list out;
  const int n = static_cast<int>(operands.size());
  for (int k = 0; k < n; ++k) {
    HostCall call(kOp);
    Ewise p{{}, {}, {}};
    check(ewise_gradient(program_of(code, imm), n, k, &p.program));
    if (p.program.code.empty()) {
      out.append(py::none());
      continue;
    }
    const Tensor seed = call.upload("dy", dy);
    p.y = call.output(shape_of(seed), dtype_of(dy));
    for (const py::handle o : operands)
      p.operands.push_back(broadcast(call.upload("an operand", o), p.y));
    p.operands.push_back(broadcast(seed, p.y));
    run_op(ewise, p, kernel, nullptr);
    out.append(call.download(p.y));
  }
  return out;
}

}  // namespace

PYBIND11_MODULE(_ops_ewise, m) {
  m.doc() =
      "Elementwise programs on CUDA: unary, binary, where, cast, broadcast, fused chains, "
      "gradients.\n"
      "A program is 5 integers an instruction (opcode, class, a, b, c) and its constants; the "
      "opcodes\n"
      "are those of docs/operators.md.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(ewise_rows()); }, "[(name, range)] of the kernels.");
  m.def("forward", forward, py::arg("code"), py::arg("imm"), py::arg("operands"), py::kw_only(),
        py::arg("y"), py::arg("stream") = 0, py::arg("kernel") = "",
        "y = program(operands). DLPack tensors on the device, any dtype and strides, broadcast to "
        "y's shape;\n"
        "on `stream` (a cudaStream_t as an integer) without copies or synchronisation; y may be an "
        "operand\n"
        "of its own shape. At most 12 operands and 40 instructions. Integer division by zero gives "
        "0.\n"
        "Raises InvalidArgument, Unsupported, NoDevice, DeviceError.");
  m.def("gradient", gradient, py::arg("code"), py::arg("imm"), py::arg("operands"),
        py::arg("operand"),
        "(code, imm) of dL/d operand over the operands and then dy; empty code: the gradient is "
        "zero. It has\n"
        "y's shape: summing over broadcast axes is the caller's.");
  m.def("forward_numpy", forward_numpy, py::arg("code"), py::arg("imm"), py::arg("operands"),
        py::kw_only(), py::arg("dtype"), py::arg("kernel") = "",
        "forward over host arrays, of the broadcast shape and `dtype`; bfloat16 is uint16 bit "
        "patterns.");
  m.def("backward_numpy", backward_numpy, py::arg("code"), py::arg("imm"), py::arg("operands"),
        py::arg("dy"), py::kw_only(), py::arg("kernel") = "",
        "[dL/d operand] of y's shape (sum over broadcast axes yourself), None where it is zero.");
}
