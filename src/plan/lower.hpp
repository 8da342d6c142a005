// Lowering: a static graph becomes a StepList. View operators turn into layouts, everything else
// into the low-level operators of docs/operators.md.
#pragma once

#include <vector>

#include "ir/graph.hpp"
#include "plan/steps.hpp"

namespace rm::plan {

/// Where a value comes from when it is not computed by the lowered nodes.
struct External {
  BufferKind kind = BufferKind::kInput;  // kInput or kConstant
  int32_t index = 0;
  ir::Layout layout;
  int64_t bytes = 0;
  bool donated = false;
};

struct LowerRequest {
  const ir::Graph* graph = nullptr;             // static types only
  std::vector<int32_t> nodes;                   // node indices, in order
  std::vector<const External*> externals;       // by value id; nullptr: computed here
  std::vector<ir::ValueId> results;             // what to keep
  bool own_outputs = true;  // results become contiguous output buffers, else any view will do
  /// By result: axes that may repeat one element (stride 0), as they do in the original's result.
  std::vector<ir::Ints> repeated;
};

/// Throws rm::Error(RM_UNIMPLEMENTED, "RM202") for an operator lowering does not know.
StepList lower(const LowerRequest& request);

}  // namespace rm::plan
