// Substitute the shape, split off constants, lower, select, plan, verify, pack.
#include "engine/instance.hpp"

#include <algorithm>
#include <chrono>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/log.hpp"
#include "engine/bind_symbols.hpp"
#include "engine/constant_expressions.hpp"
#include "engine/recorded_run.hpp"
#include "ir/byte_count.hpp"
#include "ops/registry.hpp"
#include "passes/passes.hpp"
#include "plan/lower.hpp"

namespace rm::engine {
namespace {

using Clock = std::chrono::steady_clock;

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Whether two elements lie in the same place, as in an expanded tensor. Axes are passed from the
// shortest stride on; each has to step over all that those before it reach.
bool overlaps_itself(const ir::Layout& layout) {
  if (layout.is_empty()) return false;
  std::vector<std::pair<int64_t, int64_t>> axes;
  for (size_t d = 0; d < layout.dims.size(); ++d) {
    if (layout.dims[d] > 1) axes.emplace_back(layout.strides[d], layout.dims[d]);
  }
  std::sort(axes.begin(), axes.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : axes) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

// Inputs and needed constants as the lowering sees them. `used` gets the constants by index.
std::vector<plan::External> externals_of(const ir::Graph& graph, const ConstantAnalysis& analysis,
                                         const std::vector<ir::Layout>& inputs,
                                         const std::vector<runtime::ConstantPtr>& constants,
                                         plan::LowerRequest& request,
                                         std::vector<runtime::ConstantPtr>& used) {
  std::vector<plan::External> externals(graph.num_values());
  request.externals.assign(graph.num_values(), nullptr);
  auto declare = [&](ir::ValueId v, plan::External e) {
    externals[static_cast<size_t>(v)] = std::move(e);
    request.externals[static_cast<size_t>(v)] = &externals[static_cast<size_t>(v)];
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (graph.value(graph.inputs()[i]).donated && overlaps_itself(inputs[i])) {
      throw_invalid("[plan] expected memory of its own for each element of an input that is updated, got "
                    "elements that share it; try a copy");
    }
    declare(graph.inputs()[i], {plan::BufferKind::kInput, static_cast<int32_t>(i), inputs[i],
                                extent_bytes(inputs[i]), graph.value(graph.inputs()[i]).donated});
  }
  for (ir::ValueId v : analysis.needed) {
    const auto& c = constants[static_cast<size_t>(v)];
    declare(v,
            {plan::BufferKind::kConstant, static_cast<int32_t>(used.size()), c->layout, c->bytes});
    used.push_back(c);
  }
  return externals;
}

void describe_outputs(Instance& instance) {
  for (const auto& r : instance.plan->outputs) {
    const plan::Buffer& b = instance.plan->buffers[static_cast<size_t>(r.buffer)];
    instance.outputs.push_back(r.layout);
    instance.output_input.push_back(b.kind == plan::BufferKind::kInput ? b.index : -1);
  }
}

void count_flops(Instance& instance, const ir::Graph& graph, const std::vector<int32_t>& body) {
  for (int32_t n : body) {
    const ir::Node& node = graph.nodes[static_cast<size_t>(n)];
    const double flops = ops::cost(graph, node).flops;
    instance.flops += flops;
    if (!ops::get(node.op).is(ops::kOpaque)) instance.native_flops += flops;
  }
}

// Which rows, in which configuration, the steps of a plan use; order and number do not count.
uint64_t kernel_set_of(const plan::Plan& plan) {
  std::set<std::string> rows;
  for (const plan::PlannedStep& step : plan.steps) {
    if (step.kernel == nullptr || step.kernel->row == nullptr) continue;
    const select::Row& row = *step.kernel->row;
    rows.insert(row.backend + "/" + std::string(row.name()) + "#" +
                std::to_string(step.kernel->config));
  }
  constexpr uint64_t kOffset = 14695981039346656037ULL, kPrime = 1099511628211ULL;  // FNV-1a
  uint64_t digest = kOffset;
  for (const std::string& row : rows) {
    for (const char c : row + "\n") digest = (digest ^ static_cast<unsigned char>(c)) * kPrime;
  }
  return digest;
}

/// How a background job copies weights; empty where none makes the instance.
runtime::RunCopy copies_of(const JobControl* control) {
  if (control == nullptr) return {};
  return [control](const std::function<void()>& copy) {
    control->checkpoint();
    control->run_unguarded(copy);
  };
}

void log_instance(const Instance& instance) {
  log_debug(LogTopic::kPlan, [&] {
    return "instance: " + std::to_string(instance.plan->steps.size()) + " steps, arena " +
           std::to_string(instance.plan->arena_bytes) + " bytes (lower bound " +
           std::to_string(instance.plan->lower_bound_bytes) + "), " +
           std::to_string(instance.milliseconds) + " ms";
  });
}

}  // namespace

Instance::Instance() = default;
Instance::~Instance() = default;

int64_t extent_bytes(const ir::Layout& layout) {
  if (layout.is_empty()) return 0;
  int64_t elements = 1;
  bool fits = true;
  for (size_t i = 0; i < layout.dims.size(); ++i) {
    int64_t reach = 0;
    fits = fits && !__builtin_mul_overflow(layout.dims[i] - 1, layout.strides[i], &reach) &&
           !__builtin_add_overflow(elements, reach, &elements) && elements <= ir::kMaxBytes;
  }
  if (!fits || elements < 1) {
    throw_invalid("[layout] expected strides within 2^47 elements and none before the first, got others");
  }
  return elements * static_cast<int64_t>(ir::size_bytes(layout.dtype));
}

std::shared_ptr<Instance> make_instance(const InstanceRequest& wanted,
                                        std::vector<ir::Layout> inputs) {
  const auto start = Clock::now();
  ir::Graph graph = ir::substitute(wanted.graph, bind_symbols(wanted.graph, inputs));
  ops::infer_and_check(graph);  // sizes that only looked equal while symbolic are told apart here
  if (wanted.kernels.has_rows("append_sdpa")) passes::bound_attention(graph);
  // The host's new memory is slow to come by (3 s a GB on some machines): merged weights wait, as packed
  // ones do. A device joins them at once: a launch less for every product, and nothing is packed there.
  const bool apart = wanted.store->device().is_host() && wanted.now == select::PackRule::kNone &&
                     wanted.later != select::PackRule::kNone && passes::part_products(graph);
  const runtime::RunCopy run_copy = copies_of(wanted.control);
  ConstantAnalysis analysis = analyse_constants(graph);
  std::vector<runtime::ConstantPtr> constants =
      materialise_constants(graph, analysis, wanted.kernels, *wanted.store, wanted.stream, run_copy);
  wanted.store->device().synchronize(wanted.stream);  // other streams may use them

  plan::LowerRequest request;
  request.graph = &graph;
  request.nodes = analysis.body;
  request.results = graph.outputs;
  request.repeated = wanted.repeated;
  std::vector<runtime::ConstantPtr> used;
  const auto externals = externals_of(graph, analysis, inputs, constants, request, used);
  auto plan = std::make_shared<plan::Plan>(
      plan::bind_kernels(plan::lower(request), wanted.kernels, wanted.now));
  plan::plan_memory(*plan);
  plan::verify_plan(*plan);

  auto out = std::make_shared<Instance>();
  out->inputs = std::move(inputs);
  out->store = wanted.store;
  out->constants = std::make_shared<runtime::BoundConstants>(
      runtime::bind_constants(*plan, std::move(used), *wanted.store, run_copy));
  out->apart = apart;
  out->can_pack = apart || plan::can_repack(*plan, wanted.later);
  out->plan = std::move(plan);
  out->kernel_set = kernel_set_of(*out->plan);
  describe_outputs(*out);
  count_flops(*out, graph, analysis.body);
  out->milliseconds = milliseconds_since(start);
  log_instance(*out);
  return out;
}

std::shared_ptr<Instance> repack(const Instance& from, select::PreparedCache& kernels,
                                 select::PackRule rule, const JobControl& control) {
  const auto start = Clock::now();
  auto plan = std::make_shared<plan::Plan>(
      plan::repack(*from.plan, kernels, rule, [&] { control.checkpoint(); }));
  plan::verify_plan(*plan);
  auto out = std::make_shared<Instance>();
  out->inputs = from.inputs;
  out->store = from.store;
  out->constants = std::make_shared<runtime::BoundConstants>(
      runtime::bind_constants(*plan, from.constants->constants, *from.store,
                              copies_of(&control)));
  out->plan = std::move(plan);
  out->kernel_set = kernel_set_of(*out->plan);
  out->outputs = from.outputs;
  out->output_input = from.output_input;
  out->flops = from.flops;
  out->native_flops = from.native_flops;
  out->milliseconds = milliseconds_since(start);
  log_instance(*out);
  return out;
}

}  // namespace rm::engine
