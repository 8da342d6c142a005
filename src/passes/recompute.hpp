// Rematerialisation: computes values a second time where they are read again, instead of keeping
// them, until what is alive at once fits a budget.
//
// Runs behind all other passes: equal nodes would be merged again. Nodes run in the order in which
// they stand, so a second computation stands in front of its first reader.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ir/graph.hpp"

namespace rm::passes {

/// One value that is not kept any more.
struct Recomputed {
  std::string op;         // that makes it
  std::string type;
  int64_t bytes = 0;      // freed between its last reader and the next one
  size_t nodes = 0;       // computed again for it, views not counted
  double seconds = 0;     // estimated, of what is computed again
};

struct RecomputeResult {
  /// Bytes of temporaries alive at once, before and after: results of nodes that are neither views,
  /// constants, results of the program nor values that `assign` puts into a state. Workspaces of
  /// kernels and copies that lowering makes are not known here.
  int64_t before = 0, after = 0;
  double seconds = 0;  // estimated, of the whole program as it was
  std::vector<Recomputed> values;
};

/// `graph` is static. Stops when the temporaries fit `budget_bytes`, when nothing is left that would
/// help, or when what is computed again would take longer than the program itself. Only pure nodes with a native form are computed again.
RecomputeResult recompute(ir::Graph& graph, int64_t budget_bytes);

}  // namespace rm::passes
