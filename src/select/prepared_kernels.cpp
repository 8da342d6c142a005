// Selection and preparation for one problem.
#include "select/prepared_kernels.hpp"

#include "backend/status.hpp"
#include "base/error.hpp"
#include "base/log.hpp"

namespace rm::select {

KernelState::~KernelState() {
  if (kernel_->release != nullptr) kernel_->release(state_);
}

std::shared_ptr<const Prepared> PreparedCache::get(const Problem& problem) {
  {
    std::lock_guard lock(mutex_);
    if (auto found = entries_.find(problem.key())) return found;
  }
  auto made = prepare(problem);
  std::lock_guard lock(mutex_);
  return entries_.put(problem.key(), made);
}

std::shared_ptr<const Prepared> PreparedCache::prepare(const Problem& problem) const {
  std::string_view forced;
  std::string op(problem.c().op.data, problem.c().op.size);
  if (forced_.rfind(op + ":", 0) == 0) forced = std::string_view(forced_).substr(op.size() + 1);

  auto prepared = std::make_shared<Prepared>();
  rm_kernel_state* state = nullptr;
  Selection choice;
  std::string why;
  // A library may refuse only when asked to build its code, and a row may fail its check: then the
  // next row serves.
  for (std::vector<Refusal> refused;;) {
    choice = table_->select(problem, forced, refused);
    if (RowJudge* judge = table_->judge()) why = judge->refusal(*choice.row, choice.config, problem);
    if (!why.empty()) {
      refused.push_back({choice.row, why, true});
      continue;
    }
    try {
      backend::check(
          choice.row->kernel->prepare(&problem.c(), choice.row->device, choice.config, &state),
          std::string(choice.row->name()));
      break;
    } catch (const Error& error) {
      if ((choice.row->kernel->traits & RM_KERNEL_FALLBACK) != 0) throw;
      log_info(LogTopic::kSelect, std::string(error.what()));
      refused.push_back({choice.row, "it could not be prepared"});
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
  return prepared;
}

size_t PreparedCache::size() const {
  std::lock_guard lock(mutex_);
  size_t count = 0;
  entries_.for_each([&](const Prepared&) { ++count; });
  return count;
}

}  // namespace rm::select
