// _core.eager: programs of single operators, their gradients and optimiser updates as text, and the
// recorder that puts such programs together to a whole step.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "autograd/single_operator.hpp"
#include "base/error.hpp"
#include "bindings/bind.hpp"
#include "ir/text.hpp"
#include "ir/verify.hpp"
#include "ops/registry.hpp"

namespace rm::bindings {

namespace py = pybind11;

namespace {

ir::Graph checked(const std::string& text) {
  ir::Graph graph = ir::parse(text);
  ir::verify(graph);
  ops::infer_and_check(graph);
  return graph;
}

std::string finished(ir::Graph graph) {
  graph.compact();
  ir::verify(graph);
  ops::infer_and_check(graph);
  return ir::print(graph);
}

// (dtype, shape).
ir::TensorType type_of(const py::handle& row) {
  const auto pair = row.cast<std::pair<std::string, std::vector<int64_t>>>();
  ir::TensorType type{ir::parse_dtype(pair.first), {}};
  for (int64_t d : pair.second) type.dims.emplace_back(d);
  return type;
}

// Lists are integers, tuples are sizes.
ir::Attr attr_of(const py::handle& value) {
  if (py::isinstance<py::str>(value)) return value.cast<std::string>();
  if (py::isinstance<py::float_>(value)) return value.cast<double>();
  if (py::isinstance<py::int_>(value)) return value.cast<int64_t>();
  if (py::isinstance<py::list>(value)) return value.cast<std::vector<int64_t>>();
  if (!py::isinstance<py::tuple>(value)) throw py::type_error("[op_call] expected an attribute");
  ir::Dims dims;
  for (const py::handle d : value) dims.emplace_back(d.cast<int64_t>());
  return dims;
}

std::string operation(const std::string& name, const py::sequence& operands, const py::dict& attrs) {
  std::vector<autograd::Operand> given;
  for (const py::handle operand : operands) {
    using Kind = autograd::Operand::Kind;
    if (operand.is_none()) {
      given.push_back({Kind::kAbsent, {}, 0});
    } else if (py::isinstance<py::tuple>(operand)) {
      given.push_back({Kind::kTensor, type_of(operand), 0});
    } else {
      given.push_back({Kind::kNumber, {}, operand.cast<double>()});
    }
  }
  ir::Attrs made;
  for (const auto& [key, value] : attrs) made[key.cast<std::string>()] = attr_of(value);
  return finished(autograd::operator_program(name, given, std::move(made)));
}

py::tuple gradient(const std::string& text, const std::vector<bool>& wanted) {
  autograd::GradientProgram made =
      autograd::gradient_program(checked(text), {wanted.begin(), wanted.end()});
  std::string program = finished(std::move(made.graph));
  return py::make_tuple(program, made.reads, made.gives);
}

std::string update(const py::dict& group, const py::handle& type) {
  return finished(autograd::update_program(group_rule(group), type_of(type)));
}

class Recorder {
 public:
  int32_t input(const py::handle& type) { return graph_.add_input("x", type_of(type)); }
  /// The input is a state from here on.
  void donate(int32_t value) { graph_.value(value).donated = true; }
  /// [(value, dtype, shape)] of the results.
  py::list add(const std::string& text, const std::vector<int32_t>& inputs) {
    const ir::Graph program = ir::parse(text);
    py::list out;
    for (ir::ValueId v : autograd::splice(graph_, program, inputs)) {
      std::vector<int64_t> shape;
      for (const ir::Dim& d : graph_.type(v).dims) shape.push_back(d.value());
      out.append(py::make_tuple(v, ir::name(graph_.type(v).dtype), py::tuple(py::cast(shape))));
    }
    return out;
  }
  std::string finish(const std::vector<int32_t>& outputs) {
    graph_.outputs = outputs;
    return finished(graph_);
  }

 private:
  ir::Graph graph_;
};

}  // namespace

void bind_eager(py::module_& m) {
  py::module_ e = m.def_submodule("eager", "Programs of single operators, and of recorded steps.");
  e.def("operation", &operation, py::arg("name"), py::arg("operands"), py::arg("attrs"),
        "The program of one operator. operands: (dtype, shape), a number or None. attrs: a list is "
        "integers, a tuple is sizes; `cast` takes the result's dtype, `uniform` its shape too.");
  e.def("gradient", &gradient, py::arg("text"), py::arg("wanted"),
        "(program, reads, gives) of such a program: what it reads of [inputs, results, gradients of "
        "results], which inputs' gradients it gives.");
  e.def("update", &update, py::arg("group"), py::arg("type"),
        "One optimiser's update: parameter, states (all donated), gradient, numbers f64.");
  py::class_<Recorder>(e, "Recorder", "Puts programs together to one.")
      .def(py::init<>())
      .def("input", &Recorder::input, py::arg("type"), "The value of a new input.")
      .def("donate", &Recorder::donate, py::arg("value"), "This input is updated in place.")
      .def("add", &Recorder::add, py::arg("text"), py::arg("inputs"),
           "[(value, dtype, shape)] of a program's results on these values.")
      .def("finish", &Recorder::finish, py::arg("outputs"), "The whole as a program.");
}

}  // namespace rm::bindings
