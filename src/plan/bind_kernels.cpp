// The kernels of every step of a list.
#include <algorithm>

#include "base/error.hpp"
#include "plan/fuse_steps.hpp"
#include "plan/plan.hpp"

namespace rm::plan {

namespace {

// A matrix product whose weight must not be packed says so to its kernels (docs/operators.md).
constexpr const char* kPackWeights = "pack_weights";

// What a device says of itself (docs/plugin_guide.md): what another launch of a plan costs.
constexpr const char* kLaunchNs = "launch_ns";

bool is_product(const Step& step) { return step.op == "gemm" || step.op == "grouped_gemm"; }

bool packs(select::PackRule rule, const Step& gemm) {
  if (rule != select::PackRule::kTransposed) return rule == select::PackRule::kAll;
  const ir::Layout& b = gemm.inputs[1].layout;
  auto trans = gemm.attrs.find("trans_b");
  bool rows = gemm.op == "gemm" &&
              (trans == gemm.attrs.end() || std::get<int64_t>(trans->second) != 0);
  size_t along_k = b.strides.size() - (rows ? 1 : 2);
  return b.strides[along_k] != 1;
}

// A step that reads its weight unpacked although `rule` lets it be packed.
bool gains(select::PackRule rule, const std::vector<Buffer>& buffers, const Step& step) {
  if (!is_product(step) || step.attrs.count(kPackWeights) == 0) return false;
  const Buffer& b = buffers[static_cast<size_t>(step.inputs[1].buffer)];
  return b.kind == BufferKind::kConstant && packs(rule, step);
}

std::shared_ptr<const select::Prepared> prepared(const std::vector<Buffer>& buffers, const Step& step,
                                         select::PreparedCache& cache) {
  auto operand = [&](const Ref& r) {
    if (!r.present()) return select::Operand{false, {}, false};
    const bool constant = buffers[static_cast<size_t>(r.buffer)].kind == BufferKind::kConstant;
    return select::Operand{true, r.layout, constant};
  };
  std::vector<select::Operand> inputs, outputs;
  for (const auto& r : step.inputs) inputs.push_back(operand(r));
  for (const auto& r : step.outputs) outputs.push_back(operand(r));
  return cache.get(select::Problem(step.op, inputs, outputs, step.attrs, cache.device()));
}

// What only some devices have kernels for.
void fuse_steps(StepList& list, select::PreparedCache& cache) {
  const Served served = [&](const std::vector<Buffer>& buffers, const Step& step) {
    try {
      prepared(buffers, step, cache);
      return true;
    } catch (const Error& error) {
      if (error.code() != RM_UNIMPLEMENTED) throw;
      return false;
    }
  };
  if (cache.has_rows("append_sdpa")) fuse_attention(list, served);
  if (cache.has_rows("linears") || cache.has_rows("quant_linears")) fuse_products(list, served);
  if (cache.has_rows("gemm_ewise")) fuse_programs(list, served);
  if (cache.has_rows("slopes")) fuse_slopes(list, served);
  if (cache.property(kLaunchNs) > 0) fuse_small_ewise(list, served);
  if (cache.has_rows("small_steps")) fuse_small(list, served);
  if (cache.has_rows("adams")) fuse_updates(list, served);
}

}  // namespace

Plan bind_kernels(StepList list, select::PreparedCache& cache, select::PackRule rule) {
  fuse_steps(list, cache);
  Plan plan;
  plan.buffers = std::move(list.buffers);
  plan.offsets.assign(plan.buffers.size(), -1);
  plan.outputs = std::move(list.outputs);
  plan.steps.reserve(list.steps.size());
  for (auto& step : list.steps) {
    if (is_product(step) && !packs(rule, step)) step.attrs[kPackWeights] = int64_t{0};
    auto kernel = prepared(plan.buffers, step, cache);
    plan.steps.push_back({std::move(step), std::move(kernel), -1});
  }
  return plan;
}

bool can_repack(const Plan& plan, select::PackRule rule) {
  return std::any_of(plan.steps.begin(), plan.steps.end(),
                     [&](const PlannedStep& p) { return gains(rule, plan.buffers, p.step); });
}

Plan repack(const Plan& plan, select::PreparedCache& cache, select::PackRule rule,
            const std::function<void()>& between) {
  Plan out = plan;
  for (PlannedStep& p : out.steps) {
    p.workspace_offset = -1;
    if (!gains(rule, out.buffers, p.step)) continue;
    between();
    p.step.attrs.erase(kPackWeights);
    p.kernel = prepared(out.buffers, p.step, cache);
  }
  between();
  plan_memory(out);
  return out;
}

}  // namespace rm::plan
