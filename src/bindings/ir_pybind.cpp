// _core.ir: programs as text (src/ir/text.hpp): canonical form, passes, digest.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "base/hash.hpp"
#include "base/options.hpp"
#include "bindings/bind.hpp"
#include "ir/text.hpp"
#include "ir/verify.hpp"
#include "ops/registry.hpp"
#include "partition/partition.hpp"
#include "passes/pass.hpp"
#include "passes/quantize.hpp"

namespace rm::bindings {

namespace py = pybind11;

namespace {

ir::Graph parse_checked(const std::string& text) {
  ir::Graph graph = ir::parse(text);
  ir::verify(graph);
  ops::infer_and_check(graph);
  return graph;
}

py::list ports(const std::vector<partition::Port>& ports) {
  py::list out;
  for (const partition::Port& port : ports) out.append(py::make_tuple(port.part, port.index));
  return out;
}

py::dict partition(const std::string& text, const std::vector<bool>& supported, size_t minimum) {
  partition::Partition found = partition::partition(parse_checked(text), supported, minimum);
  py::list parts;
  for (partition::Part& part : found.parts) {
    py::dict row;
    row["on_device"] = part.on_device;
    row["text"] = ir::print(part.graph);
    row["inputs"] = ports(part.inputs);
    row["nodes"] = part.nodes;
    row["states"] = part.states;
    parts.append(row);
  }
  py::dict out;
  out["parts"] = parts;
  out["outputs"] = ports(found.outputs);
  out["too_small"] = found.too_small;
  return out;
}

}  // namespace

void bind_ir(py::module_& m) {
  py::module_ ir_module = m.def_submodule("ir", "Programs in their text form (.rmir).");
  ir_module.def("canonical", [](const std::string& text) {
    ir::Graph graph = parse_checked(text);
    graph.compact();
    return ir::print(graph);
  }, py::arg("text"), "Checked, dead values dropped, renumbered: equal programs, equal text.");
  using Texts = std::map<std::string, std::string>;
  ir_module.def("run_passes", [](const std::string& text, const Texts& options) {
    ir::Graph graph = parse_checked(text);
    const Options resolved = Options::resolve({options.begin(), options.end()});
    passes::run_pipeline(graph, passes::inference_pipeline(), passes::context_from(resolved));
    return ir::print(graph);
  }, py::arg("text"), py::arg("options") = Texts(),
     "The inference pipeline applied to a program; options left out come from the environment.");
  ir_module.def("quantize", [](const std::string& text, int64_t bits, int64_t group, bool symmetric,
                               int64_t activations) {
    ir::Graph graph = parse_checked(text);
    passes::QuantizeOptions options;
    options.bits = bits, options.group = group, options.symmetric = symmetric;
    options.activation_bits = activations;
    const int64_t replaced = passes::quantize_linears(graph, options);
    return py::make_tuple(ir::print(graph), replaced);
  }, py::arg("text"), py::arg("bits"), py::arg("group") = 32, py::arg("symmetric") = true,
     py::arg("activations") = 16, "(text, count): products with constant weights of an optimised program on 8 or 4 bits.");
  ir_module.def("keep_activations", [](const std::string& text) {
    ir::Graph graph = parse_checked(text);
    passes::keep_activations(graph);
    return ir::print(graph);
  }, py::arg("text"), "The program without rounding activations to 8 bits.");
  ir_module.def("quantised_weights", [](const std::string& text) {
    py::list out;
    for (const auto& w : passes::quantised_weights(parse_checked(text))) {
      out.append(py::make_tuple(w.name, w.bits, w.group, w.symmetric, w.transposed));
    }
    return out;
  }, py::arg("text"),
     "[(name, bits, group, symmetric, transposed)]: the weights that products read quantised.");
  ir_module.def("substitute", [](const std::string& text, const std::map<std::string, int64_t>& sizes) {
    ir::Graph graph = ir::substitute(parse_checked(text), {sizes.begin(), sizes.end()});
    passes::PassContext context;
    context.optimization_level = 0;
    passes::run_pipeline(graph, passes::inference_pipeline(), context);
    return ir::print(graph);
  }, py::arg("text"), py::arg("sizes"),
     "The program for these sizes of its symbols, in canonical form and without fusions.");
  ir_module.def("partition", &partition, py::arg("text"), py::arg("supported"), py::arg("minimum"),
     "Parts for a device and the host: parts (on_device, text, inputs, nodes, states), outputs, too_small. "
     "A port is (part, output), or (-1, input) for the program's own inputs.");
  m.def("digest", [](const py::bytes& data) {
    Digest d = hash_bytes(std::string_view(data));
    return py::bytes(reinterpret_cast<const char*>(d.bytes.data()), d.bytes.size());
  }, py::arg("data"), "Content digest, 32 bytes.");
}

}  // namespace rm::bindings
