// Splits a program between a device and the host.
//
// Invariant: parts are convex (no path leaves a part and comes back), in an order in which they can
// run, and together compute what the program computes. A donated input whose one use is an update
// in place stays a donated input where the device updates it and nothing outside that part reads
// it.
#pragma once

#include <vector>

#include "ir/graph.hpp"

namespace rm::partition {

/// Where a value comes from: output `index` of part `part`, or input `index` of the program when
/// `part` is -1.
struct Port {
  int part = -1;
  int index = 0;
};

struct Part {
  bool on_device = false;
  ir::Graph graph;
  std::vector<Port> inputs;  // by input of `graph`
  /// Inputs of the program that stay on the device: they are donated inputs of `graph`, in this
  /// order, and its last outputs are their new values.
  std::vector<int> states;
  std::vector<size_t> nodes;  // of the program, in order
};

struct Partition {
  std::vector<Part> parts;
  std::vector<Port> outputs;    // of the program
  std::vector<bool> too_small;  // nodes the device supports in parts below the minimum
};

/// `supported[i]` says that the device can run node i. Device parts with fewer than `minimum`
/// nodes that compute (views do not count) run on the host. Throws rm::Error(RM_UNIMPLEMENTED,
/// RM304) for an output that is a constant.
Partition partition(const ir::Graph& graph, const std::vector<bool>& supported, size_t minimum);

}  // namespace rm::partition
