// Updates of several parameters as one step, at the last of them. Each moves down the list, which it may
// where nothing in between reads what it writes, or writes what it reads or writes.
#include <algorithm>
#include <vector>

#include "plan/fusion.hpp"

namespace rm::plan {
namespace {

constexpr size_t kMostUpdates = 12;  // of `adams`
enum Operand : size_t { kNumbers = 4, kLargest = 5, kApply = 6 };

/// adam in place and without AMSGrad's largest.
bool is_update(const Step& step) {
  return step.op == "adam" && step.updates && step.in_place && step.outputs.size() == 3 &&
         !present(step, kLargest);
}

Ref apply_of(const Step& step) { return present(step, kApply) ? step.inputs[kApply] : Ref{}; }

bool alike(const Step& a, const Step& b) {
  return a.attrs == b.attrs && same(a.inputs[kNumbers], b.inputs[kNumbers]) &&
         same(apply_of(a), apply_of(b));
}

Step together(const StepList& list, const std::vector<size_t>& members) {
  const Step& first = list.steps[members.front()];
  Step out;
  out.op = "adams", out.attrs = first.attrs;
  out.inputs = {first.inputs[kNumbers], apply_of(first)};
  for (size_t s : members) {
    const Step& one = list.steps[s];
    out.inputs.insert(out.inputs.end(), one.inputs.begin(), one.inputs.begin() + kNumbers);
    out.outputs.insert(out.outputs.end(), one.outputs.begin(), one.outputs.end());
  }
  out.updates = out.in_place = true;
  return out;
}

}  // namespace

void fuse_updates(StepList& list, const Served& served) {
  std::vector<char> gone(list.steps.size(), 0);
  for (size_t last = list.steps.size(); last-- > 0;) {
    if (gone[last] != 0 || !is_update(list.steps[last])) continue;
    std::vector<size_t> members{last};
    for (size_t s = last; s-- > 0 && members.size() < kMostUpdates;) {
      const Step& step = list.steps[s];
      if (gone[s] == 0 && is_update(step) && alike(step, list.steps[last]) && moves(list, s, last)) {
        members.push_back(s);
      }
    }
    if (members.size() == 1) continue;
    std::reverse(members.begin(), members.end());
    Step step = together(list, members);
    if (!served(list.buffers, step)) continue;
    list.steps[last] = std::move(step);
    members.pop_back();
    for (size_t s : members) gone[s] = 1;
  }
  std::vector<Step> kept;
  for (size_t s = 0; s < list.steps.size(); ++s) {
    if (gone[s] == 0) kept.push_back(std::move(list.steps[s]));
  }
  list.steps = std::move(kept);
}

}  // namespace rm::plan
