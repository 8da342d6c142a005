// assign: a state gets a new value. The result is that value, and lies in the state's memory when
// the state is an input that was given away (a parameter, an optimiser's moment).
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

Types infer_assign(const Graph& graph, const Node& node) {
  const TensorType &state = operand_type(graph, node, 0), &value = operand_type(graph, node, 1);
  check_dtype(node, value, state.dtype, "a value");
  check_rank(node, value, state.rank(), "a value");
  TensorType out = state;
  for (size_t d = 0; d < out.rank(); ++d) {
    out.dims[d] = unify(node, state.dims[d], value.dims[d], "the state and the value");
  }
  return {out};
}

std::vector<HostTensor> reference_assign(const Node&, const HostOperands& in, const Types&) {
  return {*in[1]};
}

}  // namespace

extern const OpDef kAssign{"assign",         2,        2, kNone, infer_assign, copy_cost,
                           reference_assign, Effects::kNone,
                           /*updates=*/0};

}  // namespace rm::ops
