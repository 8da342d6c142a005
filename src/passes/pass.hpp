// A pass rewrites a graph in place; a pipeline is a literal list of named passes.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/options.hpp"
#include "ir/graph.hpp"

namespace rm::passes {

struct PassContext {
  /// 0: types, canonical form and dead code only; 1 and above: also fusion.
  int optimization_level = 1;
  /// Verifies structure and types after every pass, not only after the last.
#ifdef NDEBUG
  bool verify = false;
#else
  bool verify = true;
#endif
  /// Where the graph is written after every pass ("" for nowhere); the directory must exist.
  std::string dump_dir;
  /// Bits of the weights of products, 8 or 4, and elements that share a scale; 0: as they are.
  int64_t weight_bits = 0, weight_group = 0;
  /// What their products round few rows of activations to: 16 (and all but exact) or 8 bits.
  int64_t activation_bits = 16;
  /// Quantised weights lie as a GPU's kernels read them, and activations keep their type.
  bool for_gpu = false;
};

/// optimization_level, dump_ir, precision, group_size and activations of the options table.
PassContext context_from(const Options& options, bool for_gpu = false);

using Pass = void (*)(ir::Graph&, const PassContext&);

struct NamedPass {
  std::string_view name;
  Pass run;
  int level;  // lowest optimization_level that runs it
};

/// What one pass did, in pipeline order.
struct PassRecord {
  std::string_view name;
  double ms = 0;
  size_t nodes_before = 0, nodes_after = 0;
};

std::span<const NamedPass> inference_pipeline();
/// Of a forward that is going to be differentiated.
std::span<const NamedPass> forward_pipeline(bool gpu);

/// Runs the pipeline and ends with a compact graph. Throws what a pass throws (rm::Error).
std::vector<PassRecord> run_pipeline(ir::Graph& graph, std::span<const NamedPass> pipeline,
                                     const PassContext& context);

}  // namespace rm::passes
