// _core.generate: a plugin's own generation, for the process that serves it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "backend/generators.hpp"
#include "backend/registry.hpp"
#include "base/error.hpp"
#include "bindings/bind.hpp"

namespace rm::bindings {

namespace py = pybind11;

namespace {

std::shared_ptr<backend::Generator> open(const std::string& name, size_t device,
                                         const std::string& folder,
                                         const backend::Options& options) {
  Backend* found = backend::registry().find(name);
  if (found == nullptr) throw_invalid("[generate] expected a loaded plugin, got '" + name + "'");
  const py::gil_scoped_release unlocked;
  return std::make_shared<backend::Generator>(*found, device, folder, options);
}

std::shared_ptr<backend::Generation> start(backend::Generator& self,
                                           std::vector<std::vector<int64_t>> prompts,
                                           uint64_t max_new_tokens,
                                           std::vector<int64_t> stop_tokens,
                                           backend::Options sampling,
                                           std::vector<uint64_t> seeds) {
  const py::gil_scoped_release unlocked;
  return self.start({std::move(prompts), max_new_tokens, std::move(stop_tokens),
                     std::move(sampling), std::move(seeds)});
}

}  // namespace

void bind_generate(py::module_& m) {
  py::module_ sub = m.def_submodule("generate", "Devices that run a generation themselves.");
  py::class_<backend::Generation, std::shared_ptr<backend::Generation>>(
      sub, "Generation", "A batch under way; dropping it ends it.")
      .def(
          "step",
          [](backend::Generation& self) {
            backend::Generation::Step step;
            {
              const py::gil_scoped_release unlocked;
              step = self.step();
            }
            return py::make_tuple(step.tokens, step.log_probabilities);
          },
          "(a token a row, their log probabilities or nan).");
  py::class_<backend::Generator, std::shared_ptr<backend::Generator>>(sub, "Generator",
                                                                      "A model of a plugin.")
      .def(py::init(&open), py::arg("backend"), py::arg("device"), py::arg("folder"),
           py::arg("options"))
      .def_property_readonly("max_tokens", &backend::Generator::max_tokens)
      .def("start", &start, py::keep_alive<0, 1>(), py::arg("prompts"), py::arg("max_new_tokens"),
           py::arg("stop_tokens"), py::arg("sampling"), py::arg("seeds"));
}

}  // namespace rm::bindings
