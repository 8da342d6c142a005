// _core.training: steps that are settled.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings/bind.hpp"
#include "training/settled_step.hpp"

namespace rm::bindings {

namespace py = pybind11;
using training::SettledStep;
using training::WatchedOptimizer;

void bind_training(py::module_& module) {
  py::module_ m = module.def_submodule("training", "Training steps that are settled (decision 0220).");
  py::class_<WatchedOptimizer>(m, "WatchedOptimizer", "An optimiser of torch's as one program knows it.")
      .def(py::init([](py::object optimizer, const py::list& rules, const py::list& global_hooks) {
             std::vector<autograd::GroupRule> made;
             for (const py::handle rule : rules) made.push_back(group_rule(rule.cast<py::dict>()));
             return WatchedOptimizer(std::move(optimizer), std::move(made), global_hooks);
           }),
           py::arg("optimizer"), py::arg("rules"), py::arg("global_hooks"));
  py::class_<SettledStep>(m, "SettledStep",
                          "A step that ran and was compared, with all that was looked at before it.")
      .def(py::init<std::shared_ptr<router::TorchFacts>, std::shared_ptr<exchange::FrameworkProgram>, py::object,
                    WatchedOptimizer, const py::list&, py::object, const py::list&, const py::list&,
                    const py::list&, const py::list&, const py::list&, const py::list&>(),
           py::arg("facts"), py::arg("program"), py::arg("tree"), py::arg("optimizer"), py::arg("batch"),
           py::arg("hyper"), py::arg("trained"), py::arg("buffers"), py::arg("frozen"), py::arg("hooks"),
           py::arg("quiet"), py::arg("still"))
      .def("run", &SettledStep::run, py::arg("inputs"), py::arg("targets"),
           "The loss, or None where something is not as it was: then nothing has happened.");
}

}  // namespace rm::bindings
