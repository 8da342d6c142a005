// What runs of a program took, step by step, while somebody traces it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "plan/plan.hpp"

namespace rm::engine {

struct TracedRun {
  std::shared_ptr<const plan::Plan> plan;
  int64_t start_ns = 0;  // std::chrono::steady_clock
  int64_t thread = 0;    // the system's number of it
  std::vector<int64_t> step_ns;
};

/// Bounded: what does not fit is counted. Not thread safe.
class StepTrace {
 public:
  void add(TracedRun run) {
    if (steps_ + run.step_ns.size() > kMostSteps) {
      ++dropped_;
      return;
    }
    steps_ += run.step_ns.size();
    runs_.push_back(std::move(run));
  }
  std::vector<TracedRun> take_runs() {
    steps_ = 0;
    return std::exchange(runs_, {});
  }
  int64_t dropped() const { return dropped_; }

 private:
  static constexpr size_t kMostSteps = 2'000'000;  // 16 MB of times
  std::vector<TracedRun> runs_;
  size_t steps_ = 0;
  int64_t dropped_ = 0;
};

}  // namespace rm::engine
