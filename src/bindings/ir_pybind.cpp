// _core.ir: programs as text (src/ir/text.hpp): canonical form, passes, digest.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <string>

#include "base/hash.hpp"
#include "base/options.hpp"
#include "bindings/bind.hpp"
#include "ir/signature.hpp"
#include "ir/text.hpp"
#include "ir/verify.hpp"
#include "ops/registry.hpp"
#include "partition/partition.hpp"
#include "passes/pass.hpp"
#include "passes/quantize.hpp"
#include "passes/recompute.hpp"

namespace rm::bindings {

namespace py = pybind11;
using namespace pybind11::literals;

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

/// Sizes of the inputs that a test looks at. False when one has another number of axes.
bool collect(const std::vector<ir::Signature::Test::Input>& inputs, const py::list& shapes,
             std::vector<int64_t>& sizes) {
  for (const auto& [number, rank] : inputs) {
    if (number >= shapes.size()) return false;
    PyObject* shape = PyList_GET_ITEM(shapes.ptr(), static_cast<Py_ssize_t>(number));
    if (!PyTuple_Check(shape)) throw py::type_error("[signature] expected a tuple of sizes");
    if (PyTuple_GET_SIZE(shape) != static_cast<Py_ssize_t>(rank)) return false;
    for (size_t axis = 0; axis < rank; ++axis) {
      PyObject* item = PyTuple_GET_ITEM(shape, static_cast<Py_ssize_t>(axis));
      const int64_t size = PyLong_AsLongLong(item);
      if (size == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
      sizes.push_back(size);
    }
  }
  return true;
}

void bind_signature(py::module_& m) {
  using Test = ir::Signature::Test;
  py::class_<Test>(m, "SizeTest", "Whether a program is right for a call of these sizes.")
      .def("__call__", [](const Test& test, const py::list& shapes) {
        std::vector<int64_t> sizes;
        sizes.reserve(16);
        return collect(test.inputs(), shapes, sizes) && test.accepts(sizes);
      }, py::arg("shapes"), "Shapes of all inputs, a tuple of sizes each.");
  const auto texts = [](const std::vector<ir::Dims>& inputs) {
    std::vector<std::vector<std::string>> out;
    for (const ir::Dims& dims : inputs) {
      out.emplace_back();
      for (const ir::Dim& dim : dims) out.back().push_back(dim.str());
    }
    return out;
  };
  py::class_<ir::Signature>(m, "Signature", "Sizes of a program's inputs and relations of them.")
      .def(py::init<std::string_view>(), py::arg("text"), "Reads the head of the text only.")
      .def_property_readonly("input_dims", [texts](const ir::Signature& signature) {
        return texts(signature.inputs());
      }, "[[size, ...], ...]: a number or an expression of symbols, by input.")
      .def_property_readonly("relations", [](const ir::Signature& signature) {
        std::vector<std::string> out;
        for (const ir::Relation& relation : signature.relations()) out.push_back(relation.str());
        return out;
      }, "Relations of sizes that the program is right for: s0<=512.")
      .def("test", &ir::Signature::test, py::arg("skip") = std::vector<bool>(),
           "The test of a call's sizes; inputs with a mark in `skip` are not looked at.");
}

}  // namespace

void bind_ir(py::module_& m) {
  py::module_ ir_module = m.def_submodule("ir", "Programs in their text form (.rmir).");
  bind_signature(ir_module);
  ir_module.def("canonical", [](const std::string& text) {
    ir::Graph graph = parse_checked(text);
    graph.compact();
    return ir::print(graph);
  }, py::arg("text"), "Checked, dead values dropped, renumbered: equal programs, equal text.");
  using Texts = std::map<std::string, std::string>;
  ir_module.def("run_passes", [](const std::string& text, const Texts& options, bool gpu) {
    ir::Graph graph = parse_checked(text);
    const Options resolved = Options::resolve({options.begin(), options.end()});
    passes::run_pipeline(graph, passes::inference_pipeline(), passes::context_from(resolved, gpu));
    return ir::print(graph);
  }, py::arg("text"), py::arg("options") = Texts(), py::arg("gpu") = false,
     "The inference pipeline applied to a program; options left out come from the environment. "
     "gpu: quantised weights lie as a GPU's kernels read them.");
  ir_module.def("run_forward_passes", [](const std::string& text, bool gpu) {
    ir::Graph graph = parse_checked(text);
    const size_t weights = graph.weights().size();
    passes::run_pipeline(graph, passes::forward_pipeline(gpu),
                         passes::context_from(Options::resolve({}), gpu));
    // Whoever trains them finds weights by name, also one that turned out to have no effect.
    return graph.weights().size() == weights ? ir::print(graph) : text;
  }, py::arg("text"), py::arg("gpu"),
     "A forward in which formulas that have a gradient of their own are operators: on a CPU losses.");
  ir_module.def("recompute", [](const std::string& text, int64_t budget_bytes) {
    ir::Graph graph = parse_checked(text);
    const passes::RecomputeResult made = passes::recompute(graph, budget_bytes);
    ir::verify(graph);
    ops::infer_and_check(graph);
    py::list values;
    for (const passes::Recomputed& v : made.values) {
      values.append(py::dict("operator"_a = v.op, "type"_a = v.type, "bytes"_a = v.bytes,
                             "operators"_a = v.nodes,
                             "share"_a = v.seconds / std::max(made.seconds, 1e-12)));
    }
    return py::dict("text"_a = ir::print(graph), "before"_a = made.before, "after"_a = made.after,
                    "values"_a = values);
  }, py::arg("text"), py::arg("budget_bytes"),
     "A program whose temporaries fit the budget, or the nearest that was found: text, before and "
     "after (bytes alive at once), values (what is computed again; share: of the program's estimated time).");
  ir_module.def("quantize", [](const std::string& text, int64_t bits, int64_t group, bool symmetric,
                               int64_t activations, bool pairs) {
    ir::Graph graph = parse_checked(text);
    passes::QuantizeOptions options;
    options.bits = bits, options.group = group, options.symmetric = symmetric;
    options.activation_bits = activations, options.pairs = pairs;
    const int64_t replaced = passes::quantize_linears(graph, options);
    return py::make_tuple(ir::print(graph), replaced);
  }, py::arg("text"), py::arg("bits"), py::arg("group") = 32, py::arg("symmetric") = true,
     py::arg("activations") = 16, py::arg("pairs") = false, "(text, count): products with constant weights of an optimised program on 8 or 4 bits.");
  ir_module.def("keep_activations", [](const std::string& text) {
    ir::Graph graph = parse_checked(text);
    passes::keep_activations(graph);
    return ir::print(graph);
  }, py::arg("text"), "The program without rounding activations to 8 bits.");
  ir_module.def("quantised_weights", [](const std::string& text) {
    py::list out;
    for (const auto& w : passes::quantised_weights(parse_checked(text))) {
      out.append(py::make_tuple(w.name, w.bits, w.group, w.symmetric, w.transposed, w.pairs));
    }
    return out;
  }, py::arg("text"),
     "[(name, bits, group, symmetric, transposed, pairs)]: the weights that products read quantised.");
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
