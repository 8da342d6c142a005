// _core.autograd: gradients and training steps as programs in their text form.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "autograd/differentiate.hpp"
#include "autograd/rules.hpp"
#include "autograd/training_step.hpp"
#include "base/error.hpp"
#include "bindings/bind.hpp"
#include "ir/text.hpp"
#include "ir/verify.hpp"
#include "ops/evaluate.hpp"
#include "ops/registry.hpp"

namespace rm::bindings {

namespace py = pybind11;
using namespace pybind11::literals;

autograd::GroupRule group_rule(const py::dict& row) {
  auto flag = [&](const char* name) { return row.contains(name) && row[name].cast<bool>(); };
  autograd::GroupRule rule;
  const auto algorithm = row["algorithm"].cast<std::string>();
  if (algorithm != "sgd" && algorithm != "adam") {
    throw_invalid("[training_step] expected algorithm sgd or adam, got '" + algorithm + "'");
  }
  rule.algorithm = algorithm == "sgd" ? autograd::Algorithm::kSgd : autograd::Algorithm::kAdam;
  rule.momentum = flag("momentum");
  rule.nesterov = flag("nesterov");
  rule.weight_decay = flag("weight_decay");
  rule.decoupled = flag("decoupled");
  rule.amsgrad = flag("amsgrad");
  rule.maximize = flag("maximize");
  return rule;
}

namespace {

using Sizes = std::map<std::string, int64_t>;

ir::Graph static_graph(const std::string& text, const Sizes& sizes) {
  ir::Graph graph = ir::substitute(ir::parse(text), {sizes.begin(), sizes.end()});
  ir::verify(graph);
  ops::infer_and_check(graph);
  return graph;
}

std::string finished(ir::Graph& graph) {
  graph.compact();
  ir::verify(graph);
  ops::infer_and_check(graph);
  return ir::print(graph);
}

using Trained = std::vector<std::pair<std::vector<std::string>, size_t>>;

py::dict training_step(const std::string& text, const Sizes& sizes, const Trained& parameters,
                       const py::list& groups, bool clip_norm,
                       const std::vector<std::string>& buffers, bool update, bool clip_value,
                       bool scaled, int64_t micro_batches, int64_t split_bytes,
                       const std::vector<std::string>& served, int64_t group,
                       const std::vector<std::vector<size_t>>& buckets) {
  autograd::StepRequest request;
  for (const auto& [names, group] : parameters) request.parameters.push_back({names, group});
  for (const py::handle row : groups) request.groups.push_back(group_rule(row.cast<py::dict>()));
  request.clip_norm = clip_norm;
  request.buffers = buffers;
  request.update = update;
  request.clip_value = clip_value;
  request.scaled = scaled;
  if (micro_batches < 1) throw_invalid("[training_step] expected micro_batches of 1 or more");
  request.micro_batches = micro_batches;
  request.split_bytes = split_bytes;
  request.served = {served.begin(), served.end()};
  request.group = group;
  request.buckets = buckets;
  autograd::TrainingStep step = autograd::training_step(static_graph(text, sizes), request);
  py::dict out;
  out["text"] = finished(step.graph);
  out["frozen"] = step.frozen;
  out["unused"] = step.unused;
  out["split"] = py::dict("pieces"_a = step.split.pieces, "bytes"_a = step.split.whole_bytes,
                          "piece_bytes"_a = step.split.piece_bytes);
  out["hyper"] = py::make_tuple(step.hyper_rows, step.hyper_columns);
  return out;
}

std::string differentiate(const std::string& text, const std::vector<size_t>& wrt,
                          const std::vector<std::string>& served) {
  ir::Graph graph = static_graph(text, {});
  if (graph.outputs.size() != 1) throw_invalid("[differentiate] expected one result");
  std::vector<ir::ValueId> values;
  for (size_t i : wrt) values.push_back(graph.inputs().at(i));
  for (ir::ValueId v : autograd::differentiate(graph, graph.outputs[0], values,
                                                {served.begin(), served.end()})) {
    if (v == ir::kNoValue) throw_invalid("[differentiate] expected a result that depends on it");
    graph.outputs.push_back(v);
  }
  return finished(graph);
}

std::vector<std::vector<double>> evaluate(const std::string& text,
                                          const std::vector<std::vector<double>>& inputs) {
  const ir::Graph graph = static_graph(text, {});
  if (inputs.size() != graph.inputs().size()) {
    throw_invalid("[evaluate] expected " + std::to_string(graph.inputs().size()) + " inputs");
  }
  std::vector<ops::HostTensor> tensors;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const ir::TensorType& type = graph.type(graph.inputs()[i]);
    if (static_cast<int64_t>(inputs[i].size()) != type.num_elements()) {
      throw_invalid("[evaluate] expected " + type.str() + " for input " + std::to_string(i));
    }
    tensors.push_back(ops::from_doubles(type, inputs[i]));
  }
  std::vector<std::vector<double>> out;
  for (const ops::HostTensor& t : ops::evaluate(graph, tensors)) out.push_back(ops::to_doubles(t));
  return out;
}

}  // namespace

void bind_autograd(py::module_& m) {
  py::module_ a = m.def_submodule("autograd", "Gradients and training steps as programs.");
  a.def("training_step", &training_step, py::arg("text"), py::arg("sizes"), py::arg("parameters"),
        py::arg("groups"), py::arg("clip_norm") = false,
        py::arg("buffers") = std::vector<std::string>(), py::arg("update") = true,
        py::arg("clip_value") = false, py::arg("scaled") = false, py::arg("micro_batches") = 1,
        py::arg("split_bytes") = 0, py::arg("served") = std::vector<std::string>(),
        py::arg("group") = 0, py::arg("buckets") = std::vector<std::vector<size_t>>(),
        "The step of a forward whose results are the loss and new values of buffers: text, frozen, unused, hyper (rows, columns). "
        "parameters: [(names of one weight, group)]. sizes: of the symbols. Without update: the gradients, by parameter. "
        "scaled: an input `scale` f32 [] behind those of the forward, the factor of the loss. "
        "micro_batches: more than 1 makes sums of earlier gradients inputs, by parameter. "
        "split_bytes: logits of a loss that are at least as large are made by pieces of rows (split). "
        "served: operators of gradients that the device has kernels for. "
        "group, buckets: gradients are averaged over the processes of `add_group`, by places in parameters.");
  a.def("columns", [](const std::string& algorithm) {
    return autograd::columns(algorithm == "sgd" ? autograd::Algorithm::kSgd
                                                : autograd::Algorithm::kAdam);
  }, py::arg("algorithm"), "What a row of the step's input `hyper` holds, in order.");
  a.def("sgd_numbers", [](double lr, double decay, double momentum, double dampening) {
    std::vector<double> row(autograd::columns(autograd::Algorithm::kSgd).size());
    autograd::sgd_numbers(lr, decay, momentum, dampening, row.data());
    return row;
  }, py::arg("lr"), py::arg("decay"), py::arg("momentum"), py::arg("dampening"),
        "The row of `hyper` for a step.");
  a.def("adam_numbers", [](double lr, double decay, double beta1, double beta2, double eps,
                          double count) -> std::optional<std::vector<double>> {
    std::vector<double> row(autograd::columns(autograd::Algorithm::kAdam).size());
    if (!autograd::adam_numbers(lr, decay, beta1, beta2, eps, count, row.data())) return std::nullopt;
    return row;
  }, py::arg("lr"), py::arg("decay"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("count"),
        "The row of `hyper` for the step behind `count` steps; None where torch.optim raises.");
  a.def("states", [](const py::dict& group) { return autograd::states(group_rule(group)); },
        py::arg("group"), "Names of one parameter's state tensors, in the order of the inputs.");
  a.def("differentiate", &differentiate, py::arg("text"), py::arg("wrt"),
        py::arg("served") = std::vector<std::string>(),
        "The program with the gradients of its scalar result by these inputs as further results. "
        "served: as of training_step.");
  a.def("evaluate", &evaluate, py::arg("text"), py::arg("inputs"),
        "Reference evaluation of a static program without weights, elements as doubles.");
  a.def("differentiable", [] {
    std::vector<std::string> out;
    for (auto name : autograd::differentiable_operators()) out.emplace_back(name);
    return out;
  }, "Operators that have a gradient.");
  a.def("without_gradient", [] {
    std::map<std::string, std::string> out;
    for (const ops::OpDef* def : ops::all()) {
      const autograd::NamedRule* row = autograd::find_rule(def->name);
      if (row == nullptr) {
        out.emplace(def->name, "");
      } else if (row->rule == nullptr) {
        out.emplace(def->name, row->why);
      }
    }
    return out;
  }, "All other operators, and why: \"\" for one that no table names.");
}

}  // namespace rm::bindings
