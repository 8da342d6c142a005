// A whole training step as one graph: forward, backward, clipping, update.
#pragma once

#include <string>
#include <vector>

#include "autograd/builder.hpp"
#include "autograd/optimizers.hpp"
#include "autograd/split_rows.hpp"
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
  /// One more row of `hyper`, the last: the largest norm in column 0, the largest value in column 1.
  bool clip_norm = false, clip_value = false;
  /// Gradients are those of the loss times an input, `scale` f32 []: those of half types would
  /// otherwise become zeros. Updates divide them by it, and happen only where all are finite.
  bool scaled = false;
  /// Without updates the gradients themselves are results and parameters are only read: there are
  /// no groups, no `hyper` and no states.
  bool update = true;
  /// Micro-batches of a step. With more than one, gradients are those of the loss divided by it, and
  /// sums of earlier gradients are inputs: without updates this one's are added to them in place.
  int64_t micro_batches = 1;
  /// Gradients are averaged over a group of processes, by buckets of places in `parameters`, in the
  /// order in which all processes start them; each starts behind the last of its gradients. No buckets:
  /// there is one process. Without updates nothing is averaged.
  int64_t group = 0;
  std::vector<std::vector<size_t>> buckets;
  /// Operators of gradients that the device has kernels for.
  Served served;
  /// Logits of a loss of at least so many bytes are made by pieces of their rows; 0: never.
  int64_t split_bytes = 0;
};

struct TrainingStep {
  ir::Graph graph;
  /// Inputs, in order: those of the forward; `scale`, when scaled; `hyper` f64 [rows, columns]; with
  /// several micro-batches the sums by parameter (donated when there is no update); by parameter itself
  /// and its states (donated); the buffers (donated); the weights that are not trained, named here.
  std::vector<std::string> frozen;
  /// Parameters the loss does not depend on: they have no gradient, and so no update.
  std::vector<std::string> unused;
  size_t hyper_rows = 0, hyper_columns = 0;
  SplitRows split;
};

/// `forward` is static; its results are the loss and the buffers' new values. Results: the loss, then
/// whether all gradients are finite when they are scaled and there are updates, then their norm when it
/// is clipped, then every parameter and state that is updated (or every gradient or sum, by parameter),
/// then the buffers.
/// All weights become inputs, so that tensors changed between two steps are read as they are.
/// No step of the plan that can fail comes after one that changes a parameter: updates are last.
TrainingStep training_step(ir::Graph forward, const StepRequest& request);

}  // namespace rm::autograd
