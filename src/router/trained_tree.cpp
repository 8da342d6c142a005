#include "router/trained_tree.hpp"

#include <utility>

#include "router/router.hpp"

namespace py = pybind11;

namespace rm::router {

TrainedTree::TrainedTree(std::shared_ptr<TorchFacts> facts, py::object module,
                         const py::object& sources)
    : facts_(std::move(facts)), module_(std::move(module)) {
  guard_.watch_structure_only();
  verdict_ = guard_.snapshot(module_.ptr(), *facts_, sources.ptr());
}

Reason TrainedTree::check() {
  if (guard_.taken()) verdict_ = guard_.check(module_.ptr(), *facts_);
  return verdict_;
}

py::object TrainedTree::why_not() {
  if (check() == Reason::kNone) return py::none();
  return py::make_tuple(code_of(verdict_), guard_.detail());
}

void bind_trained_tree(py::module_& router) {
  py::class_<TrainedTree>(router, "TrainedTree",
                          "Is a module tree that a program trains still what it was made from?")
      .def(py::init<std::shared_ptr<TorchFacts>, py::object, const py::object&>(), py::arg("facts"),
           py::arg("module"), py::arg("sources"))
      .def("why_not", &TrainedTree::why_not, "(reason code, detail), or None when it is.");
}

}  // namespace rm::router
