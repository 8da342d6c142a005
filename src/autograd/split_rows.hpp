// Losses over large vocabularies by pieces of their rows: logits [N, V] are never held whole.
//
// A step has both directions in one graph, and the factor of the loss is known before it. So a piece of
// rows goes through logits, loss and gradient at once, and nothing is computed twice.
#pragma once

#include <cstdint>

#include "ir/graph.hpp"

namespace rm::autograd {

struct SplitRows {
  int64_t pieces = 0;  // 0: the graph is as it was
  int64_t whole_bytes = 0, piece_bytes = 0;  // of the logits
};

/// `graph` is static and not optimised yet. Splits what lies around its largest softmax of at least
/// `least_bytes` along the rows, where all of it allows that and it saves memory. Results that belong
/// to a row are concatenated, sums over rows are added in the order of the pieces.
SplitRows split_rows(ir::Graph& graph, int64_t least_bytes);

}  // namespace rm::autograd
