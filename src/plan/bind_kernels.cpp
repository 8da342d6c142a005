// Selection and preparation for every step of a list.
#include "backend/status.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "plan/plan.hpp"

namespace rm::plan {

KernelState::~KernelState() {
  if (kernel_->release != nullptr) kernel_->release(state_);
}

std::shared_ptr<const Prepared> PreparedCache::get(const select::Problem& problem) {
  {
    std::lock_guard lock(mutex_);
    auto it = entries_.find(problem.key());
    if (it != entries_.end()) return it->second;
  }
  std::string_view forced;
  std::string op(problem.c().op.data, problem.c().op.size);
  if (forced_.rfind(op + ":", 0) == 0) forced = std::string_view(forced_).substr(op.size() + 1);

  auto prepared = std::make_shared<Prepared>();
  rm_kernel_state* state = nullptr;
  select::Selection choice;
  // A library may refuse only when asked to build its code: then the next row serves.
  for (std::vector<const select::Row*> refused;; refused.push_back(choice.row)) {
    choice = table_.select(problem, forced, refused);
    try {
      backend::check(
          choice.row->kernel->prepare(&problem.c(), choice.row->device, choice.config, &state),
          std::string(choice.row->name()));
      break;
    } catch (const Error& error) {
      if ((choice.row->kernel->traits & RM_KERNEL_FALLBACK) != 0) throw;
      log_info(LogTopic::kSelect, std::string(error.what()));
    }
  }
  const rm_kernel* kernel = choice.row->kernel;
  prepared->row = choice.row;
  prepared->config = choice.config;
  prepared->state = std::make_shared<KernelState>(kernel, state);
  if (kernel->workspace != nullptr) {
    prepared->workspace_bytes = static_cast<int64_t>(kernel->workspace(state));
  }
  prepared->reasons = std::move(choice.reasons);
  log_debug(LogTopic::kSelect, [&] {
    std::string text = problem.str() + " => " + std::string(prepared->row->name());
    for (const auto& r : prepared->reasons) text += "\n    " + r;
    return text;
  });
  std::lock_guard lock(mutex_);
  return entries_.emplace(problem.key(), std::move(prepared)).first->second;
}

size_t PreparedCache::size() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

namespace {

bool packs(PackRule rule, const Step& gemm) {
  if (rule != PackRule::kAcross) return rule == PackRule::kAll;
  const ir::Layout& b = gemm.inputs[1].layout;
  auto trans = gemm.attrs.find("trans_b");
  bool rows = trans == gemm.attrs.end() || std::get<int64_t>(trans->second) != 0;
  size_t along_k = b.strides.size() - (rows ? 1 : 2);
  return b.strides[along_k] != 1;
}

}  // namespace

Plan bind_kernels(StepList list, const std::vector<const void*>& constants, PreparedCache& cache) {
  Plan plan;
  plan.buffers = std::move(list.buffers);
  plan.offsets.assign(plan.buffers.size(), -1);
  plan.outputs = std::move(list.outputs);
  auto operand = [&](const Ref& r) {
    if (!r.present()) return select::Operand{false, {}, nullptr};
    const Buffer& b = plan.buffers[static_cast<size_t>(r.buffer)];
    const void* data =
        b.kind == BufferKind::kConstant ? constants[static_cast<size_t>(b.index)] : nullptr;
    return select::Operand{true, r.layout, data};
  };
  plan.steps.reserve(list.steps.size());
  for (auto& step : list.steps) {
    std::vector<select::Operand> inputs, outputs;
    for (const auto& r : step.inputs) inputs.push_back(operand(r));
    for (const auto& r : step.outputs) outputs.push_back(operand(r));
    if (step.op == "gemm" && !packs(cache.rule(), step)) step.attrs["pack_weights"] = int64_t{0};
    select::Problem problem(step.op, inputs, outputs, step.attrs);
    plan.steps.push_back({std::move(step), cache.get(problem), -1});
  }
  return plan;
}

}  // namespace rm::plan
