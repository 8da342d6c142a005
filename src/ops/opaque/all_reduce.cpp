// Sums over a group of processes, in two halves so that other steps run between them. The framework
// that the process group is of does the work: there is no reference.
#include "base/error.hpp"
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using Types = std::vector<ir::TensorType>;

// What orders the halves: a start behind the start before, a wait behind its start.
const ir::TensorType& token() {
  static const ir::TensorType type{ir::DType::kI32, {ir::Dim(1)}};
  return type;
}

void check_bucket(const ir::Node& node) {
  if (node.i("group") < 0 || node.i("bucket") < 0) {
    fail(node, "a group and a bucket of it", "a negative number");
  }
}

Types infer_start(const ir::Graph& graph, const ir::Node& node) {
  check_bucket(node);
  for (size_t i = 0; i + 1 < node.operands.size(); ++i) {
    if (!ir::is_floating(graph.type(node.operands[i]).dtype)) {
      fail(node, "gradients of floating types", graph.type(node.operands[i]).str());
    }
  }
  return {token()};
}

// Types as they are written: the tensors may be gone by now.
Types infer_wait(const ir::Graph& graph, const ir::Node& node) {
  check_bucket(node);
  if (!(graph.type(node.operands[0]) == token())) {
    fail(node, "what a start gives", graph.type(node.operands[0]).str());
  }
  Types out;
  for (ir::ValueId v : node.results) out.push_back(graph.type(v));
  return out;
}

std::vector<HostTensor> reference_none(const ir::Node& node, const HostOperands&, const Types&) {
  throw Error(RM_UNIMPLEMENTED,
              "[" + node.op + "] expected a group of processes, got the reference");
}

}  // namespace

extern const OpDef kAllReduceStart{"all_reduce_start", 1,         kAnyNumber,     kOpaque,
                                   infer_start,        copy_cost, reference_none, Effects::kIo};
extern const OpDef kAllReduceWait{"all_reduce_wait", 1,         1,              kOpaque,
                                  infer_wait,        copy_cost, reference_none, Effects::kIo};

}  // namespace rm::ops
