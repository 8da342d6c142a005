// The gradient of one operator is its rule on a node whose operands and results are all inputs.
#include "autograd/single_operator.hpp"

#include "autograd/rules.hpp"
#include "base/error.hpp"
#include "ops/registry.hpp"

namespace rm::autograd {

using ir::Dim;

namespace {

// Drops nodes and inputs that nothing reads; fills in the places of the inputs that stay.
void keep_what_is_read(GradientProgram& made) {
  made.graph.compact();
  const std::vector<int32_t> uses = made.graph.use_counts();
  ir::Graph kept;
  std::vector<ValueId> inputs;
  for (size_t i = 0; i < made.graph.inputs().size(); ++i) {
    const ValueId v = made.graph.inputs()[i];
    inputs.push_back(ir::kNoValue);
    if (uses[static_cast<size_t>(v)] == 0) continue;
    inputs.back() = kept.add_input("x" + std::to_string(i), made.graph.type(v));
    made.reads.push_back(i);
  }
  kept.outputs = splice(kept, made.graph, inputs);
  made.graph = std::move(kept);
}

}  // namespace

std::vector<ValueId> splice(ir::Graph& into, const ir::Graph& from,
                            const std::vector<ValueId>& inputs) {
  if (inputs.size() != from.inputs().size()) {
    throw_invalid("[splice] expected " + std::to_string(from.inputs().size()) + " inputs, got " +
                  std::to_string(inputs.size()));
  }
  std::vector<ValueId> at(from.num_values(), ir::kNoValue);
  for (size_t i = 0; i < inputs.size(); ++i) at[static_cast<size_t>(from.inputs()[i])] = inputs[i];
  const auto there = [&](ValueId v) {
    if (v == ir::kNoValue) return v;
    ValueId& to = at[static_cast<size_t>(v)];
    if (to == ir::kNoValue && from.value(v).kind == ir::ValueKind::kLiteral) {
      to = into.add_literal(from.type(v), from.value(v).literal);
    }
    return to;
  };
  for (const ir::Node& node : from.nodes) {
    ir::Node copy{node.op, {}, {}, node.attrs};
    for (ValueId v : node.operands) copy.operands.push_back(there(v));
    for (ValueId v : node.results) {
      copy.results.push_back(at[static_cast<size_t>(v)] = into.add_result(from.type(v)));
    }
    into.nodes.push_back(std::move(copy));
  }
  std::vector<ValueId> outputs;
  for (ValueId v : from.outputs) outputs.push_back(there(v));
  return outputs;
}

ir::Graph operator_program(const std::string& name, const std::vector<Operand>& operands,
                           ir::Attrs attrs) {
  ir::Graph graph;
  ir::Node node{name, {}, {}, std::move(attrs)};
  const Operand* first = nullptr;  // whose element type numbers take: not a condition's
  for (const Operand& o : operands) {
    if (o.kind != Operand::Kind::kTensor) continue;
    if (first == nullptr || first->type.dtype == ir::DType::kBool) first = &o;
  }
  if (first == nullptr) throw_invalid("[op_call] expected a tensor among the operands");
  for (const Operand& o : operands) {
    if (o.kind == Operand::Kind::kTensor) {
      node.operands.push_back(graph.add_input("x" + std::to_string(node.operands.size()), o.type));
    } else if (o.kind == Operand::Kind::kNumber) {
      node.operands.push_back(ir::add_scalar(graph, first->type.dtype, o.number));
    } else {
      node.operands.push_back(ir::kNoValue);
    }
  }
  std::vector<ir::TensorType> types;
  if (name == "cast") {
    types = {{ir::parse_dtype(node.s("dtype")), first->type.dims}};
    node.attrs.erase("dtype");
  } else if (name == "uniform") {
    types = {{ir::parse_dtype(node.s("dtype")), node.dims("shape")}};
    node.attrs.clear();
  } else {
    types = ops::infer(graph, node);
  }
  for (ir::TensorType& type : types) node.results.push_back(graph.add_result(std::move(type)));
  graph.outputs = node.results;
  graph.nodes.push_back(std::move(node));
  return graph;
}

GradientProgram gradient_program(const ir::Graph& forward, const std::vector<char>& wanted) {
  if (forward.nodes.size() != 1) throw_invalid("[gradient] expected a program of one operator");
  ir::Node node = forward.nodes[0];
  const NamedRule* row = find_rule(node.op);
  if (row == nullptr || row->rule == nullptr) {
    throw Error(RM_UNIMPLEMENTED,
                "[gradient] expected an operator with a gradient, got '" + node.op + "'", "RM702");
  }
  GradientProgram made;
  std::vector<ValueId> at(forward.num_values(), ir::kNoValue);
  for (ValueId v : forward.inputs()) {
    at[static_cast<size_t>(v)] = made.graph.add_input("x", forward.type(v));
  }
  for (ValueId v : node.results) {
    at[static_cast<size_t>(v)] = made.graph.add_input("y", forward.type(v));
  }
  std::vector<ValueId> dout;
  for (ValueId v : node.results) {
    const ValueId d = made.graph.add_input("dy", forward.type(v));
    dout.push_back(ir::is_floating(forward.type(v).dtype) ? d : ir::kNoValue);
  }
  std::vector<char> asked;  // by operand; `wanted` is by input
  std::vector<size_t> input_of;
  size_t next = 0;
  for (ValueId& v : node.operands) {
    const bool tensor = v != ir::kNoValue && forward.value(v).kind == ir::ValueKind::kInput;
    if (v != ir::kNoValue && !tensor) {
      at[static_cast<size_t>(v)] =
          made.graph.add_literal(forward.type(v), forward.value(v).literal);
    }
    input_of.push_back(next);
    asked.push_back(static_cast<char>(tensor && wanted.at(next) != 0 &&
                                      ir::is_floating(forward.type(v).dtype)));
    if (tensor) ++next;
    if (v != ir::kNoValue) v = at[static_cast<size_t>(v)];
  }
  for (ValueId& v : node.results) v = at[static_cast<size_t>(v)];

  Builder b(made.graph);
  std::vector<ValueId> din(node.operands.size(), ir::kNoValue);
  Adjoint adjoint{b, node, dout, asked, din};
  row->rule(adjoint);
  for (size_t i = 0; i < din.size(); ++i) {
    if (asked[i] == 0 || din[i] == ir::kNoValue) continue;
    made.gives.push_back(input_of[i]);
    made.graph.outputs.push_back(din[i]);
  }
  for (ir::Node& n : made.graph.nodes) n.attrs.erase("padding_idx");  // read by the rule
  keep_what_is_read(made);
  return made;
}

ir::Graph update_program(const GroupRule& rule, const ir::TensorType& type) {
  ir::Graph graph;
  Builder b(graph);
  Update what;
  what.parameter = graph.add_input("parameter", type, true);
  for (const std::string& state : states(rule)) {
    what.states.push_back(graph.add_input(state, type, true));
  }
  what.gradient = graph.add_input("gradient", type);
  const auto count = static_cast<int64_t>(columns(rule.algorithm).size());
  what.numbers = b.cast(graph.add_input("hyper", {ir::DType::kF64, {Dim(count)}}), type.dtype);
  graph.outputs = update(b, rule, what);
  return graph;
}

}  // namespace rm::autograd
