// The guard of a step that trains a module: is the tree still what the program was made from?
#include <memory>
#include <utility>

#include "router/guard.hpp"
#include "router/router.hpp"
#include "router/torch.hpp"

namespace py = pybind11;

namespace rm::router {
namespace {

/// A guard on its own, for a step that trains `module`: a Python object that asks it before each run.
class TrainedTree {
 public:
  TrainedTree(std::shared_ptr<TorchFacts> facts, py::object module, const py::object& sources)
      : facts_(std::move(facts)), module_(std::move(module)) {
    guard_.watch_structure_only();
    verdict_ = guard_.snapshot(module_.ptr(), *facts_, sources.ptr());
  }

  /// (reason code, detail) of what speaks against the program; None when nothing does.
  py::object why_not() {
    if (guard_.taken()) verdict_ = guard_.check(module_.ptr(), *facts_);
    if (verdict_ == Reason::kNone) return py::none();
    return py::make_tuple(code_of(verdict_), guard_.detail());
  }

 private:
  std::shared_ptr<TorchFacts> facts_;
  py::object module_;
  Guard guard_;
  Reason verdict_ = Reason::kNone;
};

}  // namespace

void bind_trained_tree(py::module_& router) {
  py::class_<TrainedTree>(router, "TrainedTree",
                          "Is a module tree that a program trains still what it was made from?")
      .def(py::init<std::shared_ptr<TorchFacts>, py::object, const py::object&>(), py::arg("facts"),
           py::arg("module"), py::arg("sources"))
      .def("why_not", &TrainedTree::why_not, "(reason code, detail), or None when it is.");
}

}  // namespace rm::router
