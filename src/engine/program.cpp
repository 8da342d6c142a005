// Runs, weights and packing. What is slow (making instances, running kernels, giving memory back)
// happens without the lock; objects that may own another library's memory are destroyed without it.
#include "engine/program.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "base/log.hpp"
#include "engine/program_state.hpp"
#include "engine/recorded_run.hpp"
#include "ir/verify.hpp"

namespace rm::engine {
namespace {

// A recording holds an arena of its own: so many a program, of so much memory each. Plans of more
// memory take so long that launching their steps costs nothing beside them.
constexpr long kMostRecordings = 24;
constexpr long kMostIdle = 2;  // of a shape and stream: what was recorded first goes
constexpr int64_t kMostRecordedBytes = int64_t{256} << 20;
constexpr int kLaunchedBefore = 2;  // runs of a shape: all kernels are loaded then
// Runs with the same places before a recording is made that uses them, and such recordings of a
// shape: callers whose places change are served by copies.
constexpr int kSamePlaces = 3, kMostInPlace = 2;

bool packs_later(Packing p) { return p == Packing::kLater || p == Packing::kSpare; }

select::PackRule rule_of(Packing p) {
  if (p == Packing::kNever) return select::PackRule::kNone;
  return p == Packing::kSpare ? select::PackRule::kTransposed : select::PackRule::kAll;
}

bool same(DLDevice a, DLDevice b) {
  return a.device_type == b.device_type && a.device_id == b.device_id;
}

std::shared_ptr<runtime::ConstantStore> store_of(
    const ir::Graph& graph, const std::map<std::string, OwnedTensor>& weights,
    std::shared_ptr<runtime::SharedConstants> shared, const runtime::DevicePtr& device) {
  auto store = std::make_shared<runtime::ConstantStore>(std::move(shared), device);
  for (ir::ValueId v : graph.weights()) {
    const ir::Value& value = graph.value(v);
    auto it = weights.find(value.name);
    if (it == weights.end()) {
      throw Error(RM_NOT_FOUND, "[weights] expected a tensor for '" + value.name + "', got none");
    }
    const auto& [view, owner] = it->second;
    if (view.layout.dtype != value.type.dtype ||
        view.layout.dims != ir::static_dims(value.type.dims)) {
      throw_invalid("[weights] expected " + value.type.str() + " for '" + value.name +
                    "', got another type");
    }
    runtime::Constant weight{
        "w:" + value.name, view.data, extent_bytes(view.layout), view.layout, owner, false};
    if (!same(view.device, device->id())) {
      if (view.device.device_type != kDLCPU) {
        throw Error(RM_INVALID_ARGUMENT,
                    "[weights] expected '" + value.name + "' on the host or on the program's device, "
                    "got another device", "RM110");
      }
      const auto bytes = static_cast<size_t>(weight.bytes);
      std::shared_ptr<void> memory = device->allocate(bytes);
      device->upload(memory.get(), view.data, bytes);
      weight.data = memory.get();
      weight.owner = std::move(memory);
    }
    store->put_weight(std::move(weight));
  }
  return store;
}

}  // namespace

Program::Program(ir::Graph graph, std::shared_ptr<const select::KernelTable> kernels,
                 std::string forced_kernel, Packing packing, runtime::DevicePtr device) {
  if (!same(kernels->device(), device->id())) {
    throw_invalid("[program] expected kernels of the program's device, got another's");
  }
  state_ = std::make_shared<State>(std::move(graph), std::move(kernels), std::move(forced_kernel),
                                   packing, std::move(device));
  ir::verify(state_->graph);
  const std::vector<ir::Node>& nodes = state_->graph.nodes;
  if (std::any_of(nodes.begin(), nodes.end(), ir::is_kept) && !state_->kernels.has_rows("check")) {
    throw Error(RM_UNIMPLEMENTED,
                "[program] expected a forward without checks of values for a device whose kernels "
                "cannot refuse, got one; try the CPU",
                "RM212");
  }
}

Program::~Program() = default;

const ir::Graph& Program::graph() const { return state_->graph; }

const runtime::Device& Program::device() const { return *state_->device; }

void Program::repeat_outputs(std::vector<ir::Ints> axes) { state_->repeated = std::move(axes); }

void Program::share_arenas(std::shared_ptr<runtime::Arenas> arenas) {
  state_->arenas = std::move(arenas);
  state_->shares_arenas = true;
}

void Program::never_record() { state_->records = false; }

void Program::set_weights(const std::map<std::string, OwnedTensor>& weights,
                          std::shared_ptr<runtime::SharedConstants> shared) {
  auto store = store_of(state_->graph, weights, std::move(shared), state_->device);
  InstanceCache::Dropped old;
  {
    std::lock_guard lock(state_->mutex);
    store.swap(state_->store);
    old = state_->instances.clear();
    state_->packed_once = false;
  }
  background_.cancel();  // its jobs are of the old weights: pack_later posts none after the swap
}

std::shared_ptr<Instance> Program::instance(const std::vector<TensorView>& inputs,
                                            rm_stream* stream) {
  std::shared_ptr<runtime::ConstantStore> store;
  bool pack;
  {
    std::lock_guard lock(state_->mutex);
    if (auto found = state_->instances.find(inputs)) return found;
    store = state_->store;
    pack = !packs_later(state_->packing) || state_->packed_once;
  }
  std::vector<ir::Layout> layouts;
  layouts.reserve(inputs.size());
  for (const auto& t : inputs) layouts.push_back(t.layout);
  const select::PackRule rule = rule_of(state_->packing);
  InstanceRequest request{state_->graph, state_->repeated, state_->kernels, std::move(store)};
  request.now = pack ? rule : select::PackRule::kNone;
  request.later = rule;
  request.stream = stream;
  std::shared_ptr<Instance> made = make_instance(request, std::move(layouts));

  InstanceCache::Dropped dropped;
  std::lock_guard lock(state_->mutex);
  // Weights may have been replaced meanwhile: this run may use the old ones, no later run may.
  if (made->store != state_->store) return made;
  if (auto first = state_->instances.find(inputs)) return first;
  dropped = state_->instances.insert(made);
  return made;
}

Program::Run Program::start(const std::vector<TensorView>& inputs, void* stream) {
  Run run;
  run.stream = state_->device->stream_of(stream);
  {
    std::lock_guard lock(state_->mutex);
    run.instance = state_->instances.find(inputs);
    if (run.instance != nullptr) {
      if (auto& idle = run.instance->idle; !idle.empty()) {
        run.context = std::move(idle.back());
        idle.pop_back();
      }
      run.arena = state_->arenas->acquire(run.stream, run.instance->plan->arena_bytes);
    }
  }
  if (run.instance == nullptr) {
    run.instance = instance(inputs, run.stream);
    std::lock_guard lock(state_->mutex);
    run.arena = state_->arenas->acquire(run.stream, run.instance->plan->arena_bytes);
  }
  if (run.context == nullptr) {
    run.context = std::make_unique<runtime::ExecutionContext>(run.instance->plan,
                                                              run.instance->constants);
  }
  if (run.arena.bytes < run.instance->plan->arena_bytes) {
    run.arena = {};  // first: two of them need not exist at once
    run.arena = runtime::make_arena(run.instance->plan->arena_bytes, *state_->device);
  }
  run.context->bind_arena(run.arena.base());
  return run;
}

void Program::finish(Run run) {
  std::vector<runtime::Arena> dropped;
  std::lock_guard lock(state_->mutex);
  run.instance->idle.push_back(std::move(run.context));
  dropped = state_->arenas->release(run.stream, std::move(run.arena),
                                    state_->instances.largest_arena(), state_->shares_arenas);
}

void Program::accept_kernels(uint64_t set) {
  std::lock_guard lock(state_->mutex);
  state_->accepted_kernels.insert(set);
}

uint64_t Program::kernel_set(const std::vector<TensorView>& inputs, void* stream) {
  return instance(inputs, state_->device->stream_of(stream))->kernel_set;
}

bool Program::accepted(Instance& instance) {
  if (instance.kernels_accepted.load(std::memory_order_relaxed)) return true;
  std::lock_guard lock(state_->mutex);
  const bool known = state_->accepted_kernels.contains(instance.kernel_set);
  instance.kernels_accepted.store(known, std::memory_order_relaxed);
  return known;
}

namespace {

// The last of those that nobody uses for which `fits` is true.
template <class Fits>
std::unique_ptr<RecordedRun> taken(std::vector<std::unique_ptr<RecordedRun>>& idle, Fits fits) {
  for (auto it = idle.rbegin(); it != idle.rend(); ++it) {
    if (!fits(**it)) continue;
    std::unique_ptr<RecordedRun> out = std::move(*it);
    idle.erase(std::next(it).base());
    return out;
  }
  return nullptr;
}

// Whether tensors lie where they lay in the runs before, so often that a recording in place pays.
bool stays_in_place(Instance& instance, const std::vector<TensorView>& inputs,
                    const std::vector<void*>& outputs) {
  std::vector<const void*>& last = instance.last_places;
  const size_t count = inputs.size() + outputs.size();
  bool same = last.size() == count;
  last.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const void* here = i < inputs.size() ? inputs[i].data : outputs[i - inputs.size()];
    same = same && last[i] == here;
    last[i] = here;
  }
  instance.same_places = same ? instance.same_places + 1 : 0;
  return instance.same_places >= kSamePlaces && instance.in_place < kMostInPlace;
}

}  // namespace

// A recording that uses just these tensors; null where there is none, and none is made.
std::unique_ptr<RecordedRun> Program::recorded_in_place(Instance& instance,
                                                        const std::vector<TensorView>& inputs,
                                                        const std::vector<void*>& outputs,
                                                        rm_stream* on) {
  {
    std::lock_guard lock(state_->mutex);
    const bool stays = stays_in_place(instance, inputs, outputs);
    auto found = taken(instance.recorded[on], [&](const RecordedRun& r) {
      return r.in_place() && r.takes(inputs, outputs);
    });
    if (found != nullptr || !stays || state_->recordings.use_count() > kMostRecordings) return found;
    ++instance.in_place;
  }
  try {
    return std::make_unique<RecordedRun>(instance, inputs, &outputs, *state_->device,
                                         state_->recordings);
  } catch (const Error& error) {
    log_info(LogTopic::kPlan, "a plan's tensors are copied: " + std::string(error.what()));
    return nullptr;
  }
}

// Launches a recording of the plan for these sizes; false where there is none and none is made.
bool Program::run_recorded(const std::vector<TensorView>& inputs, OutputAllocator& outputs,
                           bool only_accepted, void* stream) {
  rm_stream* const on = state_->device->stream_of(stream);
  std::shared_ptr<Instance> instance;
  std::unique_ptr<RecordedRun> recorded, dropped;
  {
    std::lock_guard lock(state_->mutex);
    if (state_->traced.load(std::memory_order_relaxed)) return false;
    instance = state_->instances.find(inputs);
    if (instance == nullptr) return false;
    auto& idle = instance->recorded[on];
    recorded = taken(idle, [&](const RecordedRun& r) { return !r.in_place() && r.takes(inputs, {}); });
    if (recorded == nullptr) {
      // Memory that changes with every run is not worth a recording.
      if (instance->launched.load(std::memory_order_relaxed) < kLaunchedBefore ||
          instance->last_updated != RecordedRun::updated(*instance, inputs) ||
          !RecordedRun::possible(*instance) || RecordedRun::bytes(*instance) > kMostRecordedBytes) {
        return false;
      }
      const auto copying = [](const auto& r) { return !r->in_place(); };
      if (std::count_if(idle.begin(), idle.end(), copying) >= kMostIdle) {
        const auto first = std::find_if(idle.begin(), idle.end(), copying);
        dropped = std::move(*first);
        idle.erase(first);
      } else if (state_->recordings.use_count() > kMostRecordings) {
        return false;
      }
    }
  }
  dropped.reset();
  const auto give_back = [&](std::unique_ptr<RecordedRun> which) {
    if (which == nullptr) return;
    std::lock_guard lock(state_->mutex);
    instance->recorded[on].push_back(std::move(which));
  };
  if (only_accepted && !accepted(*instance)) {
    give_back(std::move(recorded));
    return false;
  }
  if (recorded == nullptr) {
    try {
      recorded = std::make_unique<RecordedRun>(*instance, inputs, nullptr, *state_->device,
                                               state_->recordings);
    } catch (const Error& error) {
      log_info(LogTopic::kPlan, "a plan is launched step by step: " + std::string(error.what()));
      return false;
    }
  }
  std::vector<void*> memory(instance->outputs.size(), nullptr);
  for (size_t i = 0; i < memory.size(); ++i) {
    if (instance->output_input[i] >= 0) {
      outputs.reuse(i, static_cast<size_t>(instance->output_input[i]));
    } else {
      memory[i] = outputs.allocate(i, instance->outputs[i]);
    }
  }
  std::unique_ptr<RecordedRun> in_place = recorded_in_place(*instance, inputs, memory, on);
  (in_place != nullptr ? in_place : recorded)->run(inputs, memory, on);
  give_back(std::move(in_place));
  give_back(std::move(recorded));
  return true;
}

void Program::run(const std::vector<TensorView>& inputs, OutputAllocator& outputs,
                  bool only_accepted, void* stream) {
  const bool records = state_->records && state_->device->can_record();
  if (records && run_recorded(inputs, outputs, only_accepted, stream)) return;
  Run run = start(inputs, stream);
  const std::shared_ptr<Instance> instance = run.instance;
  if (only_accepted && !accepted(*instance)) {
    finish(std::move(run));
    throw NewKernels{instance->kernel_set};
  }
  for (size_t i = 0; i < inputs.size(); ++i) run.context->bind_input(i, inputs[i].data);
  for (size_t i = 0; i < instance->outputs.size(); ++i) {
    if (instance->output_input[i] >= 0) {
      outputs.reuse(i, static_cast<size_t>(instance->output_input[i]));
    } else {
      run.context->bind_output(i, outputs.allocate(i, instance->outputs[i]));
    }
  }
  if (state_->traced.load(std::memory_order_relaxed)) [[unlikely]] {
    run_traced(run);
  } else {
    run.context->run(run.stream);
  }
  finish(std::move(run));
  if (records) {
    std::lock_guard lock(state_->mutex);
    instance->last_updated = RecordedRun::updated(*instance, inputs);
    instance->launched.fetch_add(1, std::memory_order_relaxed);
  }
  if (instance->can_pack && ++instance->calls == 2) pack_later(instance);
}

void Program::write(void* to, const void* from, size_t bytes, void* stream) {
  state_->device->write(to, from, bytes, state_->device->stream_of(stream));
}

std::shared_ptr<void> Program::launch_into(const std::vector<TensorView>& inputs,
                                           OutputAllocator& outputs, void* stream) {
  struct Kept {
    std::shared_ptr<Instance> instance;
    std::unique_ptr<runtime::ExecutionContext> context;
    runtime::Arena arena;
  };
  auto kept = std::make_shared<Kept>();
  {
    std::lock_guard lock(state_->mutex);
    const bool traced = state_->traced.load(std::memory_order_relaxed);
    if (!traced) kept->instance = state_->instances.find(inputs);
  }
  if (kept->instance == nullptr || !state_->device->can_record() ||
      kept->instance->launched.load(std::memory_order_relaxed) < kLaunchedBefore ||
      !RecordedRun::whole(*kept->instance)) {
    throw Error(RM_FAILED_PRECONDITION,
                "[program] expected sizes that ran and kernels that can be recorded, got others");
  }
  const Instance& instance = *kept->instance;
  kept->context = std::make_unique<runtime::ExecutionContext>(instance.plan, instance.constants);
  kept->arena = runtime::make_arena(instance.plan->arena_bytes, *state_->device);
  kept->context->bind_arena(kept->arena.base());
  for (size_t i = 0; i < inputs.size(); ++i) kept->context->bind_input(i, inputs[i].data);
  for (size_t i = 0; i < instance.outputs.size(); ++i) {
    if (instance.output_input[i] >= 0) {
      outputs.reuse(i, static_cast<size_t>(instance.output_input[i]));
    } else {
      kept->context->bind_output(i, outputs.allocate(i, instance.outputs[i]));
    }
  }
  kept->context->run(state_->device->stream_of(stream));
  return kept;
}

void Program::pack_later(const std::shared_ptr<Instance>& from) {
  std::lock_guard lock(state_->mutex);
  if (from->store != state_->store) return;
  background_.post([state = state_, from, better = std::shared_ptr<Instance>()](
                       const JobControl& control) mutable {
    const select::PackRule rule = rule_of(state->packing);
    if (from->apart) {
      InstanceRequest request{state->graph, state->repeated, state->kernels, from->store};
      request.now = request.later = rule;
      request.control = &control;
      better = make_instance(request, from->inputs);
    } else {
      better = repack(*from, state->kernels, rule, control);
    }
    std::lock_guard lock(state->mutex);
    if (from->store == state->store && state->instances.replace(*from, better)) {
      state->packed_once = true;
    }
  });
}

}  // namespace rm::engine
