// rm_abstract.ops._ops_sampling
#include "module_kit.hpp"
#include "sampling/api.hpp"

namespace {

using namespace rm::ops_bindings;
using namespace rm::cuda_ops;
constexpr const char* kOp = "sampling";

void forward(py::handle logits, py::handle u, py::handle tokens, py::handle probability,
             py::handle rng, double temperature, std::int64_t top_k, double top_p,
             std::uintptr_t stream, const char* kernel) {
  const OptionalTensor draw(kOp, "u", u), state(kOp, "rng", rng),
      share(kOp, "probability", probability);
  Sampling p;
  p.logits = device_tensor(kOp, "logits", logits), p.tokens = device_tensor(kOp, "tokens", tokens);
  p.probability = share.get(), p.u = draw.get(), p.rng = state.get();
  p.temperature = temperature, p.top_k = top_k, p.top_p = top_p;
  run_op(sampling, p, kernel, stream_of(stream));
}

void advance_step(py::handle tokens, py::handle found, py::handle length, py::handle positions,
             py::handle open, py::handle eos, py::handle pad, py::handle mask,
             std::uintptr_t stream) {
  const OptionalTensor counts(kOp, "positions", positions), rows(kOp, "open", open),
      ends(kOp, "eos", eos), filler(kOp, "pad", pad), seen(kOp, "mask", mask);
  Advance p;
  p.tokens = device_tensor(kOp, "tokens", tokens), p.found = device_tensor(kOp, "found", found);
  p.length = device_tensor(kOp, "length", length);
  p.positions = counts.get(), p.open = rows.get(), p.eos = ends.get(), p.pad = filler.get();
  p.mask = seen.get();
  run_op(advance, p, stream_of(stream));
}

py::tuple forward_numpy(py::handle logits, py::handle u, py::handle rng, double temperature,
                        std::int64_t top_k, double top_p, const char* kernel) {
  HostCall call(kOp);
  Sampling p;
  p.logits = call.upload("logits", logits);
  p.u = call.upload_optional("u", u), p.rng = call.upload_optional("rng", rng);
  p.temperature = temperature, p.top_k = top_k, p.top_p = top_p;
  const auto rows = p.logits.rank > 0 ? static_cast<py::ssize_t>(p.logits.shape[0]) : 0;
  p.tokens = call.output({rows}, py::dtype::of<std::int64_t>());
  p.probability = call.keep(call.output({rows}, py::dtype::of<float>()));
  run_op(sampling, p, kernel, nullptr);
  return py::make_tuple(call.download(p.tokens), call.download(*p.probability));
}

}  // namespace

PYBIND11_MODULE(_ops_sampling, m) {
  m.doc() = "Tokens from logits on CUDA: argmax, temperature, top-k, top-p.";
  add_exceptions(m);
  m.def(
      "kernels", [] { return describe(sampling_rows()); }, "[(name, range)] of the kernels.");
  m.def(
      "forward", forward, py::arg("logits"), py::arg("u") = py::none(), py::kw_only(),
      py::arg("tokens"), py::arg("probability") = py::none(), py::arg("rng") = py::none(),
      py::arg("temperature") = 1.0, py::arg("top_k") = 0, py::arg("top_p") = 1.0,
      py::arg("stream") = 0, py::arg("kernel") = "",
      "tokens [R] int64 (and probability [R] float32: the token's, after the cuts) from logits "
      "[R, V] of\nfloat32, bfloat16 or float16, dense rows, DLPack tensors on the device. "
      "temperature 0: the first\nmaximum. Else a draw from softmax(logits / temperature), cut to "
      "top_k (0: all), then to the fewest\nthat reach top_p of what is left; of equal logits the "
      "lower index goes first. The draw is the first\nindex at which the kept probability exceeds "
      "u [R] float32 in [0, 1), or 64 bits of Philox 4x32-10 from\nrng [2] int64 on the device "
      "(seed, offset; add to the offset between calls). A row with a NaN or\ninfinite maximum "
      "gives "
      "its argmax and probability NaN. On `stream`. Raises InvalidArgument,\nUnsupported, "
      "NoDevice, "
      "DeviceError.");
  m.def("advance", advance_step, py::arg("tokens"), py::kw_only(), py::arg("found"), py::arg("length"),
        py::arg("positions") = py::none(), py::arg("open") = py::none(),
        py::arg("eos") = py::none(), py::arg("pad") = py::none(), py::arg("mask") = py::none(),
        py::arg("stream") = 0,
        "The end of a step of generation, in one launch that starts after all before it has ended. "
        "tokens [R]\nint64; where open [R] bool is false a row gets pad (one int64, where given), "
        "and a token of eos [E]\nint64 makes it false. found [P, R] int64 gets the tokens as row "
        "length (one int64; beyond P none does),\nthen length and positions (int64, any dense "
        "shape) grow by one, and column length of mask [R, C] int64\nbecomes 1 (beyond C none does). "
        "DLPack tensors on the device. On\n`stream`. Raises InvalidArgument, "
        "NoDevice, DeviceError.");
  m.def("forward_numpy", forward_numpy, py::arg("logits"), py::arg("u") = py::none(), py::kw_only(),
        py::arg("rng") = py::none(), py::arg("temperature") = 1.0, py::arg("top_k") = 0,
        py::arg("top_p") = 1.0, py::arg("kernel") = "",
        "forward over host arrays: (tokens, probability); bfloat16 is uint16 bit patterns.");
}
