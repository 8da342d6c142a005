#include "router/router.hpp"

#include <memory>
#include <utility>

#include "router/direct.hpp"
#include "router/kinds.hpp"
#include "router/torch.hpp"

namespace py = pybind11;

namespace rm::router {

void bind_router(py::module_& module) {
  py::module_ router = module.def_submodule("router", "The per-call router of routed modules.");
  bind_write_tracker(router);
  bind_direct(router);
  router.def(
      "kind_of", [](const py::object& value) { return name_of(kind_of(value.ptr())); },
      py::arg("value"),
      "How values of this kind are compared: 'plain' by value; 'fixed' (one object a value) and "
      "'scalar' (immutable) by identity; 'tuple', 'list', 'dict', 'set' by what they hold; 'other': "
      "unknown");
  router.def(
      "same_value",
      [](const py::object& before, const py::object& now) {
        return same_value(before.ptr(), now.ptr());
      },
      py::arg("before"), py::arg("now"), "Whether the guard would find two values the same");
  py::class_<TorchFacts, std::shared_ptr<TorchFacts>>(router, "Facts")
      .def(py::init([](py::object torch, py::object disabled, py::object decline,
                       std::shared_ptr<WriteTracker> writes) {
             return std::make_shared<TorchFacts>(torch.ptr(), disabled.ptr(), decline.ptr(),
                                                 std::move(writes));
           }),
           py::arg("torch"), py::arg("disabled_var"), py::arg("decline_type"), py::arg("writes"))
      .def("ignore_training",
           [](TorchFacts& facts, py::type type) { facts.ignore_training(type.ptr()); })
      .def("add_quiet_variable",
           [](TorchFacts& facts, py::object var) { facts.add_quiet_variable(var.ptr()); })
      .def_property_readonly("fast_versions", &TorchFacts::fast_versions)
      .def("version", [](TorchFacts& facts, py::object t) { return facts.version(t.ptr()); });
  bind_trained_tree(router);
  bind_routes(router);
}

}  // namespace rm::router
