// A Plan: steps with their kernels chosen and prepared, and every temporary at an arena offset.
// Immutable once made and shareable between threads; contexts (src/runtime) hold what runs.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "plan/steps.hpp"
#include "select/kernel_table.hpp"

namespace rm::plan {

inline constexpr int64_t kArenaAlignment = 256;

/// A kernel prepared for one problem; released with the last plan that uses it.
class KernelState {
 public:
  KernelState(const rm_kernel* kernel, rm_kernel_state* state) : kernel_(kernel), state_(state) {}
  ~KernelState();
  KernelState(const KernelState&) = delete;
  KernelState& operator=(const KernelState&) = delete;
  const rm_kernel* kernel() const { return kernel_; }
  const rm_kernel_state* get() const { return state_; }

 private:
  const rm_kernel* kernel_;
  rm_kernel_state* state_;
};

/// What selection and preparation gave for one problem.
struct Prepared {
  const select::Row* row = nullptr;
  uint32_t config = 0;
  std::shared_ptr<KernelState> state;
  int64_t workspace_bytes = 0;
  std::vector<std::string> reasons;
};

/// Which constant weights kernels may copy into a layout of their own.
enum class PackRule {
  kNone,    // all are read where they lie
  kAcross,  // those that lie as [K,N]: reading them row by row of the result crosses every line
  kAll,
};

/// Prepared kernels by problem: plans of neighbouring shapes share most of them. Thread safe.
class PreparedCache {
 public:
  /// A gemm step whose weights the rule leaves alone says so to its kernels (docs/operators.md).
  explicit PreparedCache(const select::KernelTable& table, std::string forced = {},
                         PackRule rule = PackRule::kAll)
      : table_(table), forced_(std::move(forced)), rule_(rule) {}
  PackRule rule() const { return rule_; }
  std::shared_ptr<const Prepared> get(const select::Problem& problem);
  size_t size() const;

 private:
  const select::KernelTable& table_;
  const std::string forced_;  // "op:kernel" of RM_FORCE_KERNEL, or empty
  const PackRule rule_;
  mutable std::mutex mutex_;
  std::unordered_map<std::string, std::shared_ptr<const Prepared>> entries_;
};

struct PlannedStep {
  Step step;
  std::shared_ptr<const Prepared> kernel;
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

/// Chooses and prepares the kernel of every step. `constants[i]` is the first byte of constant i.
Plan bind_kernels(StepList list, const std::vector<const void*>& constants, PreparedCache& cache);

/// Gives every temporary and workspace an arena offset.
void plan_memory(Plan& plan);

/// Independent of the planner: throws rm::Error(RM_INTERNAL) when a read precedes its write, or
/// two buffers that are alive together overlap, or a view leaves its buffer.
void verify_plan(const Plan& plan);

}  // namespace rm::plan
