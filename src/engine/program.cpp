// Instances: substitute the shape, split off constants, lower, select, plan, verify.
#include "engine/program.hpp"

#include <algorithm>
#include <chrono>

#include "backend/status.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "engine/bind_symbols.hpp"
#include "engine/constant_expressions.hpp"
#include "ir/verify.hpp"
#include "ops/registry.hpp"
#include "plan/lower.hpp"
#include "runtime/aligned_memory.hpp"

namespace rm::engine {
namespace {

// Instances are a few hundred kilobytes without their arenas; arenas dominate for long sequences.
constexpr size_t kMaxInstances = 64;

int64_t buffer_bytes(const ir::Layout& layout) {
  int64_t last = 0;
  for (size_t i = 0; i < layout.dims.size(); ++i) {
    if (layout.dims[i] == 0) return 0;
    last += (layout.dims[i] - 1) * layout.strides[i];
  }
  return (last + 1) * static_cast<int64_t>(ir::size_bytes(layout.dtype));
}

bool packs_later(Packing p) { return p == Packing::kLater || p == Packing::kSpare; }

// Moving data is not counted as compute; every other step is a node of the report.
bool is_compute(const plan::Step& step) { return step.op != "copy"; }

}  // namespace

Program::Program(ir::Graph graph, const select::KernelTable& kernels, std::string forced_kernel,
                 Packing packing)
    : graph_(std::move(graph)),
      packing_(packing),
      kernels_(kernels, forced_kernel,
               packing == Packing::kSpare ? plan::PackRule::kAcross : plan::PackRule::kAll),
      direct_kernels_(kernels, forced_kernel, plan::PackRule::kNone),
      store_(std::make_shared<runtime::ConstantStore>()) {
  ir::verify(graph_);
}

void Program::set_weights(const std::map<std::string, TensorView>& weights,
                          std::shared_ptr<runtime::SharedConstants> shared) {
  background_.cancel();  // it reads the old weights
  auto store = std::make_shared<runtime::ConstantStore>(std::move(shared));
  for (ir::ValueId v : graph_.weights()) {
    const ir::Value& value = graph_.value(v);
    auto it = weights.find(value.name);
    if (it == weights.end()) {
      throw Error(RM_NOT_FOUND, "[weights] expected a tensor for '" + value.name + "', got none");
    }
    const ir::Layout& layout = it->second.layout;
    if (layout.dtype != value.type.dtype || layout.dims != ir::static_dims(value.type.dims)) {
      throw_invalid("[weights] expected " + value.type.str() + " for '" + value.name +
                    "', got another type");
    }
    store->put({"w:" + value.name, it->second.data, buffer_bytes(layout), layout, nullptr});
  }
  std::lock_guard lock(mutex_);
  store_ = std::move(store);
  instances_.clear();
  recent_.clear();
  newest_ = nullptr;
  packed_once_ = false;
}

std::shared_ptr<Program::Instance> Program::instantiate(const std::vector<ir::Layout>& inputs,
                                                        bool pack,
                                                        const std::atomic<bool>* cancelled) {
  auto start = std::chrono::steady_clock::now();
  std::shared_ptr<runtime::ConstantStore> store;
  {
    std::lock_guard lock(mutex_);
    store = store_;
  }
  plan::PreparedCache& kernels = pack ? kernels_ : direct_kernels_;
  ir::Graph graph = ir::substitute(graph_, bind_symbols(graph_, inputs));
  ops::infer_and_check(graph);  // sizes that only looked equal while symbolic are told apart here
  ConstantAnalysis analysis = analyse_constants(graph);
  std::vector<runtime::ConstantPtr> constants =
      materialise_constants(graph, analysis, kernels, *store);

  std::vector<plan::External> externals(graph.num_values());
  plan::LowerRequest request;
  request.graph = &graph;
  request.nodes = analysis.body;
  request.results = graph.outputs;
  request.repeated = repeated_;
  request.externals.assign(graph.num_values(), nullptr);
  auto declare = [&](ir::ValueId v, plan::External e) {
    externals[static_cast<size_t>(v)] = std::move(e);
    request.externals[static_cast<size_t>(v)] = &externals[static_cast<size_t>(v)];
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    declare(graph.inputs()[i], {plan::BufferKind::kInput, static_cast<int32_t>(i), inputs[i],
                                buffer_bytes(inputs[i]), graph.value(graph.inputs()[i]).donated});
  }
  std::vector<runtime::ConstantPtr> used;
  std::vector<const void*> data;
  for (ir::ValueId v : analysis.needed) {
    const auto& c = constants[static_cast<size_t>(v)];
    declare(v,
            {plan::BufferKind::kConstant, static_cast<int32_t>(used.size()), c->layout, c->bytes});
    used.push_back(c);
    data.push_back(c->data);
  }
  auto out = std::make_shared<Instance>();
  auto plan = std::make_shared<plan::Plan>(plan::bind_kernels(plan::lower(request), data, kernels));
  plan::plan_memory(*plan);
  plan::verify_plan(*plan);
  out->constants = std::make_shared<runtime::BoundConstants>(
      runtime::bind_constants(*plan, std::move(used), *store, cancelled));
  out->packed = pack;
  for (const auto& r : plan->outputs) {
    const plan::Buffer& b = plan->buffers[static_cast<size_t>(r.buffer)];
    out->outputs.push_back(r.layout);
    out->output_input.push_back(b.kind == plan::BufferKind::kInput ? b.index : -1);
  }
  for (int32_t n : analysis.body) {
    out->flops += ops::cost(graph, graph.nodes[static_cast<size_t>(n)]).flops;
    bool bridge = graph.nodes[static_cast<size_t>(n)].op.rfind("aten.", 0) == 0;
    if (!bridge) out->native_flops += ops::cost(graph, graph.nodes[static_cast<size_t>(n)]).flops;
  }
  out->plan = std::move(plan);
  out->milliseconds =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
  log_debug(LogTopic::kPlan, [&] {
    return "instance: " + std::to_string(out->plan->steps.size()) + " steps, arena " +
           std::to_string(out->plan->arena_bytes) + " bytes (lower bound " +
           std::to_string(out->plan->lower_bound_bytes) + "), " +
           std::to_string(out->milliseconds) + " ms";
  });
  return out;
}

std::shared_ptr<Program::Instance> Program::instance(const std::vector<ir::Layout>& inputs) {
  Key key;
  for (const auto& l : inputs) {
    key.insert(key.end(), l.dims.begin(), l.dims.end());
    key.insert(key.end(), l.strides.begin(), l.strides.end());
  }
  {
    std::lock_guard lock(mutex_);
    auto it = instances_.find(key);
    if (it != instances_.end()) {
      recent_.splice(recent_.begin(), recent_, it->second.second);
      return it->second.first;
    }
  }
  bool pack = packing_ == Packing::kFirst;
  if (packs_later(packing_)) {
    std::lock_guard lock(mutex_);
    pack = packed_once_;
  }
  std::shared_ptr<Instance> made = instantiate(inputs, pack);
  std::lock_guard lock(mutex_);
  auto it = instances_.find(key);
  if (it != instances_.end()) return it->second.first;
  recent_.push_front(key);
  instances_.emplace(std::move(key), std::make_pair(made, recent_.begin()));
  newest_ = made;
  if (instances_.size() > kMaxInstances) {
    instances_.erase(recent_.back());
    recent_.pop_back();
  }
  return made;
}

void Program::run(const std::vector<TensorView>& inputs, OutputAllocator& outputs) {
  std::vector<ir::Layout> layouts;
  layouts.reserve(inputs.size());
  for (const auto& t : inputs) layouts.push_back(t.layout);
  std::shared_ptr<Instance> inst = instance(layouts);

  std::unique_ptr<runtime::ExecutionContext> context;
  {
    std::lock_guard lock(inst->mutex);
    if (!inst->idle.empty()) {
      context = std::move(inst->idle.back());
      inst->idle.pop_back();
    }
  }
  if (context == nullptr) {
    context = std::make_unique<runtime::ExecutionContext>(inst->plan, inst->constants);
  }
  for (size_t i = 0; i < inputs.size(); ++i) context->bind_input(i, inputs[i].data);
  for (size_t i = 0; i < inst->outputs.size(); ++i) {
    if (inst->output_input[i] >= 0) {
      outputs.reuse(i, static_cast<size_t>(inst->output_input[i]));
    } else {
      context->bind_output(i, outputs.allocate(i, inst->outputs[i]));
    }
  }
  context->run();
  if (packs_later(packing_) && !inst->packed && ++inst->calls == 2) {
    pack_later(layouts, inst);
  }
  std::lock_guard lock(inst->mutex);
  inst->idle.push_back(std::move(context));
}

void Program::pack_later(const std::vector<ir::Layout>& inputs,
                         const std::shared_ptr<Instance>& from) {
  background_.post([this, inputs, from](const std::atomic<bool>& cancelled) {
    std::shared_ptr<Instance> better = instantiate(inputs, true, &cancelled);
    std::lock_guard lock(mutex_);
    packed_once_ = true;
    for (auto& [key, entry] : instances_) {
      if (entry.first != from) continue;
      entry.first = better;
      newest_ = better;
    }
  });
}

ProgramReport Program::report() const {
  std::lock_guard lock(mutex_);
  ProgramReport r;
  r.instances = static_cast<int64_t>(instances_.size());
  r.packed_bytes = store_->packed_bytes();
  r.derived_bytes = store_->derived_bytes();
  if (newest_ == nullptr) return r;
  const plan::Plan& plan = *newest_->plan;
  for (const auto& p : plan.steps) {
    ++r.kernels[p.kernel->row->backend + "/" + std::string(p.kernel->row->name())];
    if (!is_compute(p.step)) continue;
    ++r.nodes;
    r.native_nodes += p.kernel->row->is_bridge() ? 0 : 1;
  }
  r.flops = newest_->flops;
  r.native_flops = newest_->native_flops;
  r.arena_bytes = plan.arena_bytes;
  r.arena_lower_bound_bytes = plan.lower_bound_bytes;
  r.last_instantiate_ms = newest_->milliseconds;
  return r;
}

namespace {

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

}  // namespace

std::string Program::describe(const std::vector<ir::Layout>& inputs) {
  std::shared_ptr<Instance> inst = instance(inputs);
  std::string out;
  for (const auto& p : inst->plan->steps) out += text(p) + "\n";
  return out;
}

std::vector<std::pair<std::string, double>> Program::profile(const std::vector<TensorView>& inputs,
                                                             int rounds) {
  std::vector<ir::Layout> layouts;
  for (const auto& t : inputs) layouts.push_back(t.layout);
  std::shared_ptr<Instance> inst = instance(layouts);
  runtime::ExecutionContext context(inst->plan, inst->constants);
  std::vector<std::shared_ptr<void>> memory;
  for (size_t i = 0; i < inputs.size(); ++i) context.bind_input(i, inputs[i].data);
  for (size_t i = 0; i < inst->outputs.size(); ++i) {
    if (inst->output_input[i] >= 0) continue;
    memory.push_back(runtime::allocate_host(static_cast<size_t>(inst->outputs[i].num_bytes())));
    context.bind_output(i, memory.back().get());
  }
  context.run();  // warm
  std::vector<std::vector<int64_t>> samples(inst->plan->steps.size());
  for (int r = 0; r < rounds; ++r) {
    std::vector<int64_t> ns;
    context.run_timed(ns);
    for (size_t s = 0; s < ns.size(); ++s) samples[s].push_back(ns[s]);
  }
  std::vector<std::pair<std::string, double>> out;
  for (size_t s = 0; s < samples.size(); ++s) {
    auto middle = samples[s].begin() + static_cast<std::ptrdiff_t>(samples[s].size() / 2);
    std::nth_element(samples[s].begin(), middle, samples[s].end());
    out.emplace_back(text(inst->plan->steps[s]), static_cast<double>(*middle));
  }
  return out;
}

}  // namespace rm::engine
