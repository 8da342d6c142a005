// A compiled program: one symbolic graph, its weights, and an instance (plan) per concrete shape.
//
// Instances are made on demand in milliseconds and share prepared kernels, derived and packed
// weights. run() may be called from any number of threads; each call uses a context of its own.
#pragma once

#include <atomic>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/background.hpp"
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
  /// Row-major, but for strides of 0 along the axes given to Program::repeat_outputs: memory for
  /// one element along those is enough.
  virtual void* allocate(size_t index, const ir::Layout& layout) = 0;
  /// Output `index` is the donated input `input`, updated in place; called instead of `allocate`.
  virtual void reuse(size_t index, size_t input) = 0;
};

struct ProgramReport {
  int64_t nodes = 0, native_nodes = 0;  // compute steps of the newest instance
  double flops = 0, native_flops = 0;
  std::map<std::string, int64_t> kernels;  // "backend/kernel" -> steps
  int64_t instances = 0, arena_bytes = 0, arena_lower_bound_bytes = 0;
  int64_t packed_bytes = 0, derived_bytes = 0;
  double last_instantiate_ms = 0;
};

/// When weights are copied into the layouts that kernels like best. A first use of that much memory
/// can cost more than many calls, so it can wait until a shape is used again.
enum class Packing {
  kNever,  // kernels read weights where they lie
  kFirst,  // before the first call
  kLater,  // behind the second call of a shape, on a thread of its own
  kSpare,  // as kLater, but only weights that lie as [K,N]; all others are read where they lie
};

class Program {
 public:
  /// `graph` must be verified and typed. `kernels` outlives the program.
  Program(ir::Graph graph, const select::KernelTable& kernels, std::string forced_kernel = {},
          Packing packing = Packing::kFirst);

  /// Replaces all weights (by graph name); instances are rebuilt on the next run. The memory must
  /// stay valid and unchanged until the next call or the program's end.
  /// Programs given one `shared` over the same weights hold what derives from them once.
  void set_weights(const std::map<std::string, TensorView>& weights,
                   std::shared_ptr<runtime::SharedConstants> shared = nullptr);

  /// Output `i` may come with stride 0 along the axes `axes[i]`; called before the first run.
  void repeat_outputs(std::vector<ir::Ints> axes) { repeated_ = std::move(axes); }

  /// Throws rm::Error before anything is written when the inputs do not fit (RM105).
  void run(const std::vector<TensorView>& inputs, OutputAllocator& outputs);

  const ir::Graph& graph() const { return graph_; }
  ProgramReport report() const;
  /// Waits until weights that were to be packed later are packed.
  void wait_for_packing() { background_.wait(); }
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
    bool packed = false;
    std::atomic<int> calls{0};
    std::mutex mutex;
    std::vector<std::unique_ptr<runtime::ExecutionContext>> idle;
  };
  using Key = std::vector<int64_t>;

  std::shared_ptr<Instance> instance(const std::vector<ir::Layout>& inputs);
  std::shared_ptr<Instance> instantiate(const std::vector<ir::Layout>& inputs, bool pack,
                                        const std::atomic<bool>* cancelled = nullptr);
  void pack_later(const std::vector<ir::Layout>& inputs, const std::shared_ptr<Instance>& from);

  const ir::Graph graph_;
  const Packing packing_;
  std::vector<ir::Ints> repeated_;
  plan::PreparedCache kernels_, direct_kernels_;  // with and without packed weights

  mutable std::mutex mutex_;  // guards what follows; never held while kernels run
  std::shared_ptr<runtime::ConstantStore> store_;
  std::map<Key, std::pair<std::shared_ptr<Instance>, std::list<Key>::iterator>> instances_;
  std::list<Key> recent_;  // newest first
  std::shared_ptr<Instance> newest_;
  bool packed_once_ = false;  // the packed weights exist: new shapes use them from the start

  Background background_;  // last: it stops before what it works on goes
};

}  // namespace rm::engine
