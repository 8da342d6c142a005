// Kernels chosen and prepared for one problem each, shared by the plans that meet it.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/weak_map.hpp"
#include "select/kernel_table.hpp"

namespace rm::select {

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
  const Row* row = nullptr;
  uint32_t config = 0;
  std::shared_ptr<KernelState> state;
  int64_t workspace_bytes = 0;
  std::vector<std::string> reasons;
};

/// Which constant weights kernels may copy into a layout of their own.
enum class PackRule {
  kNone,        // none: all are read in the layout they have
  kTransposed,  // those stored as [K,N]: reading them row by row of the result misses the caches
  kAll,
};

/// Prepared kernels by problem: plans of neighbouring shapes share most of them. Thread safe.
///
/// A kernel lasts as long as a plan uses it, so the cache is bounded by the plans that are kept.
class PreparedCache {
 public:
  explicit PreparedCache(std::shared_ptr<const KernelTable> table, std::string forced = {})
      : table_(std::move(table)), forced_(std::move(forced)) {}
  std::shared_ptr<const Prepared> get(const Problem& problem);
  DLDevice device() const { return table_->device(); }
  bool has_rows(std::string_view op) const { return table_->has_rows(op); }
  int64_t property(std::string_view name) const { return table_->property(name); }
  size_t size() const;  // kernels in use

 private:
  std::shared_ptr<const Prepared> prepare(const Problem& problem) const;

  const std::shared_ptr<const KernelTable> table_;
  const std::string forced_;  // "op:kernel" of RM_FORCE_KERNEL, or empty
  mutable std::mutex mutex_;
  WeakMap<const Prepared> entries_;
};

}  // namespace rm::select
