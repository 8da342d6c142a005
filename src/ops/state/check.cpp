// check: a condition that eager checks while it runs. Where it is false the program refuses the call,
// before anything that outlives the call was written. The result is the condition.
#include "base/error.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using Types = std::vector<ir::TensorType>;

Types infer_check(const ir::Graph& graph, const ir::Node& node) {
  const ir::TensorType& condition = operand_type(graph, node, 0);
  check_dtype(node, condition, ir::DType::kBool, "a condition");
  check_rank(node, condition, 0, "a condition");
  return {condition};
}

std::vector<HostTensor> reference_check(const ir::Node& node, const HostOperands& in, const Types&) {
  if (to_ints(*in[0])[0] == 0) {
    throw Error(RM_OUT_OF_RANGE, "[check] expected what the forward checks to hold (" +
                                     node.s_or("message", "") +
                                     "), got values for which it does not");
  }
  return {*in[0]};
}

}  // namespace

extern const OpDef kCheck{"check",   1,         1,              kNone,
                          infer_check, copy_cost, reference_check, Effects::kIo};

}  // namespace rm::ops
