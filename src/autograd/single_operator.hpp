// Programs of one operator, its gradient and one optimiser update: what eager execution dispatches
// to and what a recorded step is put together from. The rules are those of whole graphs.
#pragma once

#include <string>
#include <vector>

#include "autograd/optimizers.hpp"
#include "ir/graph.hpp"

namespace rm::autograd {

/// An operand of a single operator: a tensor, a number (a literal of the first tensor's element
/// type) or nothing.
struct Operand {
  enum class Kind { kTensor, kNumber, kAbsent } kind = Kind::kTensor;
  ir::TensorType type;  // kTensor
  double number = 0;    // kNumber
};

/// One node on inputs of these static types; its results are the program's. `cast` has the
/// attribute `dtype`, `uniform` also `shape`: they are not the operator's but the result's type.
ir::Graph operator_program(const std::string& name, const std::vector<Operand>& operands,
                           ir::Attrs attrs);

struct GradientProgram {
  ir::Graph graph;
  /// What its inputs are: places in [tensor operands..., results..., gradients of results...].
  std::vector<size_t> reads;
  /// Tensor operands whose gradients are its results, in order.
  std::vector<size_t> gives;
};

/// The gradient of a program of `operator_program` by the operands in `wanted`, given that of every
/// floating result. Throws rm::Error(RM_UNIMPLEMENTED, "RM702") when there is no rule.
GradientProgram gradient_program(const ir::Graph& forward, const std::vector<char>& wanted);

/// Inputs: parameter and its states (donated), gradient, one row of `hyper` (f64, `columns`).
ir::Graph update_program(const GroupRule& rule, const ir::TensorType& type);

/// Appends the nodes of `from`, which has no weights, to `into`, its inputs being these values.
/// Returns its outputs there.
std::vector<ValueId> splice(ir::Graph& into, const ir::Graph& from,
                            const std::vector<ValueId>& inputs);

}  // namespace rm::autograd
