// A compiled program: one symbolic graph, its weights, and an instance (plan) per concrete shape.
//
// Instances are made on demand in milliseconds and share prepared kernels, derived and packed
// weights. All functions may be called from any number of threads at once, set_weights included: a
// run keeps the weights it started with until it ends.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/background.hpp"
#include "engine/instance.hpp"
#include "engine/instance_cache.hpp"
#include "engine/step_trace.hpp"
#include "engine/tensor_view.hpp"
#include "ir/graph.hpp"
#include "ir/layout.hpp"
#include "plan/plan.hpp"
#include "runtime/arena_pool.hpp"
#include "runtime/constant_store.hpp"
#include "runtime/device.hpp"
#include "runtime/execution_context.hpp"

namespace rm::engine {

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

/// A run would use kernels whose results nobody compared yet; nothing was executed.
struct NewKernels {
  uint64_t set;
};

struct ProgramReport {
  int64_t nodes = 0, native_nodes = 0;  // compute steps of the newest instance
  double flops = 0, native_flops = 0;
  std::map<std::string, int64_t> kernels;  // "backend/kernel" -> steps
  int64_t instances = 0, arena_bytes = 0, arena_lower_bound_bytes = 0;
  int64_t packed_bytes = 0, derived_bytes = 0, free_arena_bytes = 0;
  int64_t recordings = 0;  // plans that a device replays as one launch
  double last_instantiate_ms = 0;
};

/// When weights are copied into the layouts that kernels like best. A first use of that much memory
/// can cost more than many calls, so it can wait until a shape is used again.
enum class Packing {
  kNever,  // kernels read weights in the layout they have
  kFirst,  // before the first call
  kLater,  // after the second call of a shape, on a thread of its own
  kSpare,  // as kLater, but only transposed weights ([K,N]); all others are read as they are
};

class Program {
 public:
  /// `graph` must be verified and typed. Everything the program has lies on `device`, which is the
  /// one of `kernels`, and so must inputs.
  Program(ir::Graph graph, std::shared_ptr<const select::KernelTable> kernels,
          std::string forced_kernel = {}, Packing packing = Packing::kFirst,
          runtime::DevicePtr device = runtime::host());
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  /// Replaces all weights (by graph name); instances are rebuilt on the next run. The old weights
  /// are dropped as soon as no run and no packing uses them, those of a program that ends as well.
  /// Programs given one `shared` over the same weights hold what derives from them once. Weights of
  /// the host are copied to a program's device, those on it are used where they lie.
  void set_weights(const std::map<std::string, OwnedTensor>& weights,
                   std::shared_ptr<runtime::SharedConstants> shared = nullptr);

  /// Output `i` may come with stride 0 along the axes `axes[i]`; called before the first run.
  void repeat_outputs(std::vector<ir::Ints> axes);
  /// Memory for temporaries comes from these, of other programs on the device too: for programs that
  /// run one after the other. Called before the first run.
  void share_arenas(std::shared_ptr<runtime::Arenas> arenas);
  /// Plans are launched step by step, never recorded: a recording has memory of its own for inputs and
  /// outputs, too much for a program of one operator. Called before the first run.
  void never_record();

  /// Throws rm::Error before anything is written when the inputs do not fit (RM105), and with
  /// `only_accepted` NewKernels when these sizes use a set of kernels that was not accepted yet.
  /// `stream`: the device's own handle; the work is only launched on it. Memory of inputs and outputs
  /// may be given up at once where that is ordered with the stream, as torch's allocator does.
  void run(const std::vector<TensorView>& inputs, OutputAllocator& outputs,
           bool only_accepted = false, void* stream = nullptr);
  /// Launches the steps on a stream that the caller records (a CUDA graph of its own); inputs and
  /// outputs are used where they lie. The recording is good as long as what is returned, inputs,
  /// outputs and weights are there. Throws rm::Error (RM_FAILED_PRECONDITION) where these sizes have
  /// not run, cannot be recorded or are traced: then nothing is launched.
  std::shared_ptr<void> launch_into(const std::vector<TensorView>& inputs, OutputAllocator& outputs,
                                    void* stream);
  /// Copies from the host into memory of the program's device, ordered with the work on `stream`, the
  /// device's own handle; `from` may change at once.
  void write(void* to, const void* from, size_t bytes, void* stream = nullptr);
  /// Results of this set of kernels were compared with the original's. Packing weights and other
  /// sizes give other sets.
  void accept_kernels(uint64_t set);
  /// The set that a run with these inputs uses now.
  uint64_t kernel_set(const std::vector<TensorView>& inputs, void* stream = nullptr);

  const ir::Graph& graph() const;
  ProgramReport report() const;
  /// Gives up the arenas that no run uses, those that it shares as well; their bytes. The next run makes one again.
  int64_t release_arenas();
  /// Waits until weights that were to be packed later are packed.
  void wait_for_packing() { background_.wait(); }
  /// The steps of the plan for these shapes, one a line: operator, operand types, kernel.
  std::string describe(const std::vector<ir::Layout>& inputs);
  /// Median nanoseconds of every step over `rounds` runs, as (line of `describe`, time). Donated
  /// inputs are copied, so the caller's tensors are only read.
  std::vector<std::pair<std::string, double>> profile(const std::vector<TensorView>& inputs,
                                                      int rounds, void* stream = nullptr);
  const runtime::Device& device() const;

  /// From now on every run reads the clock around each of its steps; one that is under way does not.
  void start_trace();
  /// Ends it; the runs since then. A program that is not traced pays one load of a flag a run.
  StepTrace take_trace();
  /// The steps of a plan, one a line as in `describe`.
  static std::vector<std::string> steps_of(const plan::Plan& plan);

 private:
  struct State;
  struct Run;
  void run_traced(Run& run);
  Run start(const std::vector<TensorView>& inputs, void* stream);
  bool run_recorded(const std::vector<TensorView>& inputs, OutputAllocator& outputs,
                    bool only_accepted, void* stream);
  std::unique_ptr<RecordedRun> recorded_in_place(Instance& instance,
                                                 const std::vector<TensorView>& inputs,
                                                 const std::vector<void*>& outputs, rm_stream* on);
  void finish(Run run);
  bool accepted(Instance& instance);
  std::shared_ptr<Instance> instance(const std::vector<TensorView>& inputs, rm_stream* stream);
  void pack_later(const std::shared_ptr<Instance>& from);

  std::shared_ptr<State> state_;  // background jobs share it
  Background background_;
};

}  // namespace rm::engine
