// One concrete shape of a program: its plan, the constants it holds and the contexts that run it.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <vector>

#include "engine/background.hpp"
#include "ir/graph.hpp"
#include "plan/plan.hpp"
#include "runtime/constant_store.hpp"
#include "runtime/execution_context.hpp"

namespace rm::engine {

class RecordedRun;

struct Instance {
  Instance();
  ~Instance();

  std::vector<ir::Layout> inputs;  // the shape: dtypes, dims and strides of all inputs
  /// The generation of weights it was made from. An instance of another generation than the
  /// program's is never kept.
  std::shared_ptr<runtime::ConstantStore> store;
  std::shared_ptr<const plan::Plan> plan;
  std::shared_ptr<const runtime::BoundConstants> constants;
  std::vector<ir::Layout> outputs;
  std::vector<int32_t> output_input;  // by output: the donated input that holds it, or -1
  double flops = 0, native_flops = 0, milliseconds = 0;
  bool can_pack = false;  // packing would serve it: it reads weights unpacked that need not be
  bool apart = false;  // products of merged weights run one by one: those weights are made later
  std::atomic<int> calls{0};
  uint64_t kernel_set = 0;  // digest of which kernels the plan uses; equal for equal sets
  std::atomic<bool> kernels_accepted{false};  // a copy of what the program remembers by set
  std::vector<std::unique_ptr<runtime::ExecutionContext>> idle;  // guarded by the program's mutex
  // By stream, guarded by the same; where the device records.
  std::map<rm_stream*, std::vector<std::unique_ptr<RecordedRun>>> recorded;
  std::vector<const void*> last_places;  // of inputs and outputs of the last run of a recording
  int same_places = 0;                   // runs before it that had the same
  int in_place = 0;                      // recordings made for such places
  std::vector<const void*> last_updated;  // inputs updated in place by the last run step by step
  std::atomic<int> launched{0};  // runs whose steps were launched one by one
};

struct InstanceRequest {
  const ir::Graph& graph;                     // symbolic
  const std::vector<ir::Ints>& repeated;      // LowerRequest::repeated
  select::PreparedCache& kernels;
  std::shared_ptr<runtime::ConstantStore> store;
  select::PackRule now = select::PackRule::kAll;  // which weights are packed
  select::PackRule later = select::PackRule::kAll;  // which may be packed by `repack`
  const JobControl* control = nullptr;  // of the background job that makes it
  rm_stream* stream = nullptr;  // constants are computed on it, and there when this is done
};

/// Throws rm::Error (RM105) when the inputs do not fit the graph.
std::shared_ptr<Instance> make_instance(const InstanceRequest& request,
                                        std::vector<ir::Layout> inputs);

/// The same instance with weights packed under `rule`, of one that is not apart. It takes no lock but those of `kernels` and
/// the store, and shares every kernel that packing does not change.
std::shared_ptr<Instance> repack(const Instance& from, select::PreparedCache& kernels,
                                 select::PackRule rule, const JobControl& control);

/// Bytes from the first element of a tensor to behind its last one.
int64_t extent_bytes(const ir::Layout& layout);

}  // namespace rm::engine
