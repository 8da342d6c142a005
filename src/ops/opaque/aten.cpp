// aten.<name>.<overload>: executed by the torch bridge, so types are taken as written.
#include "base/error.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using Types = std::vector<ir::TensorType>;

Types infer_aten(const ir::Graph& graph, const ir::Node& node) {
  Types out;
  for (ir::ValueId v : node.results) out.push_back(graph.type(v));
  return out;
}

std::vector<HostTensor> reference_aten(const ir::Node& node, const HostOperands&, const Types&) {
  throw Error(RM_UNIMPLEMENTED, "[" + node.op +
                                    "] expected an operator with a reference, got an aten node; "
                                    "try running it through the torch bridge");
}

}  // namespace

// Nothing is known of the operator unless the node says that it is pure.
extern const OpDef kAten{"aten",     0,         kAnyNumber,     kOpaque,
                         infer_aten, copy_cost, reference_aten, Effects::kRandom};

}  // namespace rm::ops
