// A compiled program: one symbolic graph, its weights, and an instance (plan) per concrete shape.
//
// Instances are made on demand in milliseconds and share prepared kernels, derived and packed
// weights. run() may be called from any number of threads; each call uses a context of its own.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ir/graph.hpp"
#include "ir/layout.hpp"
#include "plan/plan.hpp"
#include "runtime/constant_store.hpp"
#include "runtime/execution_context.hpp"

namespace rm::engine {

/// A tensor of the caller's: first element and layout (offset 0).
struct TensorView {
  const void* data = nullptr;
  ir::Layout layout;
};

/// Gives the memory of output `index`; called once per output before anything runs.
class OutputAllocator {
 public:
  virtual ~OutputAllocator() = default;
  virtual void* allocate(size_t index, const ir::Layout& layout) = 0;
  /// Output `index` is the donated input `input`, updated in place; called instead of `allocate`.
  virtual void reuse(size_t index, size_t input) = 0;
};

struct ProgramReport {
  int64_t nodes = 0, native_nodes = 0;        // compute steps of the newest instance
  double flops = 0, native_flops = 0;
  std::map<std::string, int64_t> kernels;     // "backend/kernel" -> steps
  int64_t instances = 0, arena_bytes = 0, arena_lower_bound_bytes = 0;
  int64_t packed_bytes = 0, derived_bytes = 0;
  double last_instantiate_ms = 0;
};

class Program {
 public:
  /// `graph` must be verified and typed. `kernels` outlives the program. Without `pack_weights` no
  /// packed copy of a weight is made: decoders read each weight once a token, where it lies.
  Program(ir::Graph graph, const select::KernelTable& kernels, std::string forced_kernel = {},
          bool pack_weights = true);

  /// Replaces all weights (by graph name); instances are rebuilt on the next run. The memory must
  /// stay valid and unchanged until the next call or the program's end.
  void set_weights(const std::map<std::string, TensorView>& weights);

  /// Throws rm::Error before anything is written when the inputs do not fit (RM105).
  void run(const std::vector<TensorView>& inputs, OutputAllocator& outputs);

  const ir::Graph& graph() const { return graph_; }
  ProgramReport report() const;
  /// One line a step of the instance for these shapes: operator, operands, kernel, reasons.
  std::string describe(const std::vector<ir::Layout>& inputs);
  /// The median nanoseconds of every step over `rounds` runs, with the step's text.
  std::vector<std::pair<std::string, double>> profile(const std::vector<TensorView>& inputs,
                                                      int rounds);

 private:
  struct Instance {
    std::shared_ptr<const plan::Plan> plan;
    std::shared_ptr<const runtime::BoundConstants> constants;
    std::vector<ir::Layout> outputs;
    std::vector<int32_t> output_input;  // by output: the donated input that holds it, or -1
    double flops = 0, native_flops = 0, milliseconds = 0;
    std::mutex mutex;
    std::vector<std::unique_ptr<runtime::ExecutionContext>> idle;
  };
  using Key = std::vector<int64_t>;

  std::shared_ptr<Instance> instance(const std::vector<ir::Layout>& inputs);
  std::shared_ptr<Instance> instantiate(const std::vector<ir::Layout>& inputs);

  const ir::Graph graph_;
  plan::PreparedCache kernels_;

  mutable std::mutex mutex_;  // guards what follows; never held while kernels run
  std::shared_ptr<runtime::ConstantStore> store_;
  std::map<Key, std::pair<std::shared_ptr<Instance>, std::list<Key>::iterator>> instances_;
  std::list<Key> recent_;  // newest first
  std::shared_ptr<Instance> newest_;
};

}  // namespace rm::engine
