// See prompt_lookup.hpp.
#include "generation/prompt_lookup.hpp"

#include <algorithm>

namespace rm::generation {
namespace {

constexpr size_t kLeastAgreeing = 2, kMostAgreeing = 16;
constexpr double kRate = 0.125;     // weight of the newest sample
constexpr double kLeastGain = 1.1;  // below it the noise of the measurements decides
constexpr double kGuess = 1.3;      // a check's cost in steps before one was measured
constexpr int64_t kTryAgain = 64;   // drafts passed over until slow checks are measured again

size_t kind_of(size_t agreeing) {
  return agreeing >= 9 ? 3 : agreeing >= 5 ? 2 : agreeing >= 3 ? 1 : 0;
}

}  // namespace

Draft look_up(const std::vector<int64_t>& text, size_t most) {
  size_t best = 0, from = 0;
  const size_t end = text.size();
  for (size_t at = end < 2 ? 0 : end - 1; at-- > 0 && best < kMostAgreeing;) {
    if (text[at] != text[end - 1]) continue;
    size_t same = 1;
    while (same < kMostAgreeing && same <= at && text[at - same] == text[end - 1 - same]) ++same;
    if (same > best) best = same, from = at + 1;
  }
  Draft draft;
  if (best < kLeastAgreeing) return draft;
  draft.kind = kind_of(best);
  // Where the occurrence overlaps the end, the text repeats with that period, and so does the
  // draft.
  const size_t period = end - from;
  for (size_t i = 0; i < most; ++i) draft.tokens.push_back(text[from + i % period]);
  return draft;
}

std::array<std::array<double, kMostDrafted>, kDraftKinds> DraftPolicy::first_guess() {
  constexpr double kHolds[kDraftKinds] = {0.3, 0.4, 0.6, 0.85};
  std::array<std::array<double, kMostDrafted>, kDraftKinds> out;
  for (size_t kind = 0; kind < kDraftKinds; ++kind) {
    double chance = 1;
    for (double& value : out[kind]) value = chance *= kHolds[kind];
  }
  return out;
}

void DraftPolicy::learn(const Draft& draft, size_t accepted) {
  auto& holds = holds_[draft.kind];
  for (size_t i = 0; i < draft.tokens.size() && i < kMostDrafted; ++i) {
    holds[i] += kRate * ((accepted > i ? 1.0 : 0.0) - holds[i]);
  }
}

void DraftPolicy::held(const Draft& draft, size_t accepted) {
  std::lock_guard lock(mutex_);
  learn(draft, accepted);
}

void DraftPolicy::checked(const Draft& draft, size_t accepted) {
  std::lock_guard lock(mutex_);
  learn(draft, accepted);
  ++counts_.checks;
  counts_.drafted += static_cast<int64_t>(draft.tokens.size());
  counts_.accepted += static_cast<int64_t>(accepted);
}

void DraftPolicy::missed(const Draft& draft, size_t accepted) {
  std::lock_guard lock(mutex_);
  const double step = cost_of(1);
  if (gain(draft, draft.tokens.size() + 1, kGuess * step) > kLeastGain) {
    const double saved = static_cast<double>(accepted + 1) - kGuess;
    missed_ns_ = std::max(0.0, missed_ns_ + saved * step);
  }
  learn(draft, accepted);
}

void DraftPolicy::took(size_t width, int64_t capacity, double ns) {
  std::lock_guard lock(mutex_);
  if (planned_.insert({width, capacity}).second) return;
  if (width > 1) counts_.check_ns = ns;
  for (auto& [known, cost] : cost_ns_) {
    if (known != width) continue;
    cost += kRate * (std::min(ns, 2 * cost) - cost);  // one interruption does not decide
    return;
  }
  cost_ns_.emplace_back(width, ns);
}

double DraftPolicy::cost_of(size_t width) const {
  for (auto [known, cost] : cost_ns_) {
    if (known == width) return cost;
  }
  return 0;
}

double DraftPolicy::gain(const Draft& draft, size_t width, double cost_ns) const {
  double tokens = 1;
  const size_t count = std::min(width - 1, draft.tokens.size());
  for (size_t i = 0; i < count; ++i) tokens += holds_[draft.kind][i];
  return cost_ns > 0 ? tokens * cost_of(1) / cost_ns : 0;
}

size_t DraftPolicy::choose(const Draft& draft, std::span<const size_t> widths) {
  if (draft.tokens.empty() || widths.empty()) return 0;
  std::lock_guard lock(mutex_);
  if (always_) return widths.back();
  size_t best = 0, hoped = 0;
  double most = kLeastGain, hope = kLeastGain;
  for (size_t width : widths) {
    const double guess = kGuess * cost_of(1), known = cost_of(width);
    const double by_guess = gain(draft, width, guess);
    const double value = known > 0 ? gain(draft, width, known) : by_guess;
    if (value > most) most = value, best = width;
    if (by_guess > hope) hope = by_guess, hoped = width;
  }
  if (best == 0 && hoped != 0 && ++passed_over_ >= kTryAgain) {
    passed_over_ = 0;
    return hoped;
  }
  return best;
}

bool DraftPolicy::wants_checks(const Draft& draft, double making_ns) const {
  std::lock_guard lock(mutex_);
  return always_ ? !draft.tokens.empty() : missed_ns_ >= making_ns;
}

DraftPolicy::Counts DraftPolicy::counts() const {
  std::lock_guard lock(mutex_);
  Counts out = counts_;
  out.step_ns = cost_of(1);
  return out;
}

}  // namespace rm::generation
