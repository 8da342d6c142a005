// A whole training step as one graph: forward, backward, clipping, update.
#pragma once

#include <string>
#include <vector>

#include "autograd/optimizers.hpp"
#include "ir/graph.hpp"

namespace rm::autograd {

struct Trained {
  std::vector<std::string> names;  // of the weight in the forward graph; several when it is tied
  size_t group = 0;
};

struct StepRequest {
  std::vector<Trained> parameters;
  std::vector<GroupRule> groups;
  /// Weights whose new values are the forward's further results, in order: running statistics.
  std::vector<std::string> buffers;
  bool clip_norm = false;  // column 0 of the last row of `hyper` is the largest norm
  /// Without updates the gradients themselves are results and parameters are only read: there are
  /// no groups, no `hyper` and no states.
  bool update = true;
};

struct TrainingStep {
  ir::Graph graph;
  /// Inputs, in order: those of the forward; `hyper` f64 [rows, columns]; by parameter itself and its
  /// states (donated); the buffers (donated); the weights that are not trained, named here.
  std::vector<std::string> frozen;
  /// Parameters the loss does not depend on: they have no gradient, and so no update.
  std::vector<std::string> unused;
  size_t hyper_rows = 0, hyper_columns = 0;
};

/// `forward` is static; its results are the loss and the buffers' new values. Results: the loss, then the norm of all gradients
/// when they are clipped, then every parameter and state that is updated (or every gradient, by parameter), then the buffers.
/// All weights become inputs, so that tensors changed between two steps are read as they are.
/// No step of the plan that can fail comes after one that changes a parameter: updates are last.
TrainingStep training_step(ir::Graph forward, const StepRequest& request);

}  // namespace rm::autograd
