// What a program says about itself: counts, steps, times.
#include <unistd.h>

#include <algorithm>
#include <chrono>

#include "engine/program.hpp"
#include "engine/program_state.hpp"
#include "runtime/device.hpp"

namespace rm::engine {
namespace {

// Moving data is not counted as compute; every other step is a node of the report.
bool is_compute(const plan::Step& step) { return step.op != "copy"; }

std::string text(const plan::Ref& r) {
  if (!r.present()) return "_";
  std::string s(ir::name(r.layout.dtype));
  for (size_t i = 0; i < r.layout.dims.size(); ++i) {
    s += (i == 0 ? "[" : ",") + std::to_string(r.layout.dims[i]);
  }
  return s + (r.layout.dims.empty() ? "[]" : "]") + "@" + std::to_string(r.buffer);
}

std::string text(const plan::PlannedStep& p) {
  std::string out = p.step.op + " (";
  for (const auto& r : p.step.inputs) out += " " + text(r);
  out += " ) ->";
  for (const auto& r : p.step.outputs) out += " " + text(r);
  return out + "  " + std::string(p.kernel->row->name());
}

// Memory of a run that nobody else sees: outputs, and copies of the inputs that a step may write.
std::vector<std::shared_ptr<void>> bind_private(runtime::ExecutionContext& context,
                                                const Instance& instance, const ir::Graph& graph,
                                                const std::vector<TensorView>& inputs,
                                                runtime::Device& device, rm_stream* stream) {
  std::vector<std::shared_ptr<void>> memory;
  for (size_t i = 0; i < inputs.size(); ++i) {
    const void* data = inputs[i].data;
    if (graph.value(graph.inputs()[i]).donated) {
      const auto bytes = static_cast<size_t>(extent_bytes(inputs[i].layout));
      memory.push_back(device.allocate(bytes));
      device.copy(memory.back().get(), data, bytes, stream);
      data = memory.back().get();
    }
    context.bind_input(i, data);
  }
  for (size_t i = 0; i < instance.outputs.size(); ++i) {
    if (instance.output_input[i] >= 0) continue;
    memory.push_back(
        device.allocate(static_cast<size_t>(instance.outputs[i].num_bytes())));
    context.bind_output(i, memory.back().get());
  }
  return memory;
}

}  // namespace

ProgramReport Program::report() const {
  ProgramReport r;
  std::shared_ptr<runtime::ConstantStore> store;
  {
    std::lock_guard lock(state_->mutex);
    store = state_->store;
    r.instances = static_cast<int64_t>(state_->instances.size());
    r.recordings = state_->recordings.use_count() - 1;
    r.free_arena_bytes = state_->arenas->free_bytes();
    if (const Instance* newest = state_->instances.newest()) {
      const plan::Plan& plan = *newest->plan;
      for (const auto& p : plan.steps) {
        ++r.kernels[p.kernel->row->backend + "/" + std::string(p.kernel->row->name())];
        if (!is_compute(p.step)) continue;
        ++r.nodes;
        r.native_nodes += p.kernel->row->is_bridge() ? 0 : 1;
      }
      r.flops = newest->flops;
      r.native_flops = newest->native_flops;
      r.arena_bytes = plan.arena_bytes;
      r.arena_lower_bound_bytes = plan.lower_bound_bytes;
      r.last_instantiate_ms = newest->milliseconds;
    }
  }
  r.packed_bytes = store->packed_bytes();
  r.derived_bytes = store->derived_bytes();
  return r;
}

int64_t Program::release_arenas() {
  int64_t bytes = 0;
  for (const runtime::Arena& arena : state_->arenas->take_free()) bytes += arena.bytes;
  return bytes;
}

std::string Program::describe(const std::vector<ir::Layout>& inputs) {
  std::vector<TensorView> views;
  for (const auto& l : inputs) views.push_back({nullptr, l});
  std::shared_ptr<Instance> inst = instance(views, state_->device->stream_of(nullptr));
  std::string out;
  for (const auto& p : inst->plan->steps) out += text(p) + "\n";
  return out;
}

std::vector<std::pair<std::string, double>> Program::profile(const std::vector<TensorView>& inputs,
                                                             int rounds, void* stream) {
  Run run = start(inputs, stream);
  const std::shared_ptr<Instance> inst = run.instance;
  const auto memory = bind_private(*run.context, *inst, state_->graph, inputs, *state_->device, run.stream);
  run.context->run(run.stream);  // warm
  std::vector<std::vector<int64_t>> samples(inst->plan->steps.size());
  for (int r = 0; r < rounds; ++r) {
    std::vector<int64_t> ns;
    run.context->run_timed(ns, *state_->device, run.stream);
    for (size_t s = 0; s < ns.size(); ++s) samples[s].push_back(ns[s]);
  }
  finish(std::move(run));
  std::vector<std::pair<std::string, double>> out;
  for (size_t s = 0; s < samples.size(); ++s) {
    auto middle = samples[s].begin() + static_cast<std::ptrdiff_t>(samples[s].size() / 2);
    std::nth_element(samples[s].begin(), middle, samples[s].end());
    out.emplace_back(text(inst->plan->steps[s]), static_cast<double>(*middle));
  }
  return out;
}

std::vector<std::string> Program::steps_of(const plan::Plan& plan) {
  std::vector<std::string> out;
  out.reserve(plan.steps.size());
  for (const auto& p : plan.steps) out.push_back(text(p));
  return out;
}

void Program::start_trace() {
  std::lock_guard lock(state_->mutex);
  state_->trace.emplace();
  state_->traced = true;
}

StepTrace Program::take_trace() {
  std::lock_guard lock(state_->mutex);
  state_->traced = false;
  StepTrace out = std::move(state_->trace).value_or(StepTrace{});
  state_->trace.reset();
  return out;
}

void Program::run_traced(Run& run) {
  TracedRun traced;
  traced.plan = run.instance->plan;
  traced.thread = ::gettid();
  traced.start_ns = std::chrono::duration_cast<std::chrono::nanoseconds>(
                        std::chrono::steady_clock::now().time_since_epoch())
                        .count();
  run.context->run_timed(traced.step_ns, *state_->device, run.stream);
  std::lock_guard lock(state_->mutex);
  if (state_->trace.has_value()) state_->trace->add(std::move(traced));
}

}  // namespace rm::engine
