// A Plan: steps with their kernels chosen and prepared, and every temporary at an arena offset.
// Immutable once made and shareable between threads; contexts (src/runtime) hold what runs.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "plan/steps.hpp"
#include "select/prepared_kernels.hpp"

namespace rm::plan {

inline constexpr int64_t kArenaAlignment = 256;

struct PlannedStep {
  Step step;
  std::shared_ptr<const select::Prepared> kernel;
  int64_t workspace_offset = -1;  // in the arena; -1: none
};

struct Plan {
  std::vector<Buffer> buffers;
  std::vector<int64_t> offsets;  // by buffer; -1 where the buffer is not in the arena
  std::vector<PlannedStep> steps;
  std::vector<Ref> outputs;
  int64_t arena_bytes = 0;
  int64_t lower_bound_bytes = 0;  // the largest sum of temporaries alive at once
};

/// Chooses and prepares the kernel of every step; steps that one kernel of the table does become one
/// before (fuse_steps.hpp).
Plan bind_kernels(StepList list, select::PreparedCache& cache, select::PackRule rule);

/// True when `rule` lets a kernel of the plan pack a weight that it reads unpacked now.
bool can_repack(const Plan& plan, select::PackRule rule);
/// The plan with those matrix products prepared anew under `rule`, and its memory planned; all other
/// kernels are shared with `plan`. `between` is called between two steps and may throw to stop.
Plan repack(const Plan& plan, select::PreparedCache& cache, select::PackRule rule,
            const std::function<void()>& between);

/// Gives every temporary and workspace an arena offset.
void plan_memory(Plan& plan);

/// Independent of the planner: throws rm::Error(RM_INTERNAL) when a read precedes its write or
/// follows an update of what it reads, when two buffers that are alive together overlap, or when a
/// view leaves its buffer.
void verify_plan(const Plan& plan);

}  // namespace rm::plan
