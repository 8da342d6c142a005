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
#include "passes/pass.hpp"

namespace rm::bindings {

namespace py = pybind11;

namespace {

ir::Graph parse_checked(const std::string& text) {
  ir::Graph graph = ir::parse(text);
  ir::verify(graph);
  ops::infer_and_check(graph);
  return graph;
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
  m.def("digest", [](const py::bytes& data) {
    Digest d = hash_bytes(std::string_view(data));
    return py::bytes(reinterpret_cast<const char*>(d.bytes.data()), d.bytes.size());
  }, py::arg("data"), "Content digest, 32 bytes.");
}

}  // namespace rm::bindings
