// See draft_check.hpp.
#include "generation/draft_check.hpp"

#include <algorithm>
#include <string>

#include "base/error.hpp"

namespace rm::generation {
namespace {

constexpr size_t kScored = 7;  // tokens of a draft that no program checks

}  // namespace

DraftCheck::DraftCheck(Drafting& drafting, StepMemory& step, const GreedyLimits& limits,
                       size_t rows)
    : drafting_(drafting),
      step_(step),
      limits_(limits),
      start_(drafting.text.size()),
      outputs_(drafting.checks.size()) {
  if (rows != 1) throw_invalid("[drafts] expected one row, got " + std::to_string(rows));
  for (const Check& check : drafting.checks) {
    if (check.width < 2 || (!widths_.empty() && check.width <= widths_.back())) {
      throw_invalid("[drafts] expected growing widths above 1");
    }
    memory_.emplace_back(check.inputs, check.roles, 1, check.width);
    if (!memory_.back().goes_with(step)) {
      throw_invalid("[drafts] expected the step's own length and mask, got others");
    }
    widths_.push_back(check.width);
  }
}

size_t DraftCheck::plan(int64_t room) {
  planned_ = nullptr;
  if (plain_next_ || room < 2) return 1;
  if (widths_.empty() && !followed_.tokens.empty()) return 1;
  draft_ = look_up(drafting_.text, widths_.empty() ? kScored : widths_.back() - 1);
  if (draft_.tokens.empty()) return 1;
  const bool may_want = drafting_.may_want && room > 2 * static_cast<int64_t>(kScored);
  if (widths_.empty() && may_want && drafting_.policy->wants_checks(draft_, drafting_.making_ns))
    return 0;
  const size_t width = drafting_.policy->choose(draft_, widths_);
  for (const Check& check : drafting_.checks) {
    const auto taken = static_cast<int64_t>(check.width);  // positions, also of the text's limit
    if (check.width != width || taken > room) continue;
    if (*step_.length + taken <= limits_.capacity) planned_ = &check;
  }
  if (planned_ != nullptr) return width;
  if (followed_.tokens.empty()) {
    followed_ = draft_;
    holds_ = 0;
  }
  return 1;
}

bool DraftCheck::run(int64_t room, GreedyResult& out, std::vector<char>& finished) {
  const auto index = static_cast<size_t>(planned_ - drafting_.checks.data());
  const auto width = static_cast<int64_t>(planned_->width);
  StepMemory& memory = memory_[index];
  StepOutputs& outputs = outputs_[index];
  draft_.tokens.resize(std::min(draft_.tokens.size(), planned_->width - 1));
  std::fill_n(memory.ids, width, step_.ids[0]);
  std::copy(draft_.tokens.begin(), draft_.tokens.end(), memory.ids + 1);
  for (int64_t i = 0; i < memory.counted; ++i) memory.positions[i] = step_.positions[0] + i;
  step_.open(width);
  try {
    planned_->program->run(planned_->inputs, outputs);
  } catch (...) {
    step_.hide(width);
    throw;
  }
  step_.hide(width);

  const auto logits = static_cast<size_t>(planned_->roles.logits);
  const ir::Layout& layout = outputs.layout(logits);
  const int64_t vocabulary = layout.dims.back();
  const auto stride = vocabulary * static_cast<int64_t>(ir::size_bytes(layout.dtype));
  const auto* first = static_cast<const char*>(outputs.data(logits));
  int64_t count = 0;
  right_ = 0;
  while (count < room && count < width) {
    const char* row = first + count * stride;
    const int64_t next = argmax(layout.dtype, row, vocabulary);
    plain_next_ = !stands_out(layout.dtype, row, vocabulary, next, drafting_.margin);
    if (plain_next_) break;
    out.tokens.push_back(next);
    step_.ids[0] = next;
    finished[0] = is_end(limits_, 0, next) ? 1 : 0;
    const bool held = right_ < draft_.tokens.size() && draft_.tokens[right_] == next;
    ++count;
    if (held) ++right_;
    if (finished[0] != 0 || !held) break;
  }
  step_.open(count);
  step_.close(count);
  out.count += count;
  return finished[0] != 0;
}

void DraftCheck::plain(const StepOutputs& outputs, const GreedyRoles& roles, int64_t token) {
  if (followed_.tokens.empty()) return;
  const auto logits = static_cast<size_t>(roles.logits);
  const ir::Layout& layout = outputs.layout(logits);
  decided_ =
      stands_out(layout.dtype, outputs.data(logits), layout.dims.back(), token, drafting_.margin);
}

void DraftCheck::ran(double ns, const GreedyResult& out) {
  drafting_.policy->took(planned_ != nullptr ? planned_->width : 1, limits_.capacity, ns);
  const auto fresh = out.tokens.begin() + static_cast<int64_t>(drafting_.text.size() - start_);
  drafting_.text.insert(drafting_.text.end(), fresh, out.tokens.end());
  if (planned_ != nullptr) {
    drafting_.policy->checked(draft_, right_);
    followed_.tokens.clear();
    return;
  }
  plain_next_ = false;
  if (followed_.tokens.empty()) return;
  const bool held = decided_ && drafting_.text.back() == followed_.tokens[holds_];
  if (held && ++holds_ < followed_.tokens.size()) return;
  if (widths_.empty()) {
    drafting_.policy->missed(followed_, holds_);
  } else {
    drafting_.policy->held(followed_, holds_);
  }
  followed_.tokens.clear();
}

}  // namespace rm::generation
