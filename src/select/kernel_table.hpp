// The kernel rows of all loaded backends, and the choice among them.
//
// Order of decision: rows of the operator in table order, those whose `supports` says yes, the
// forced row if one is named, else the lowest estimated cost; ties keep table order. Wildcard rows
// ("aten.*") come after exact ones. The trail of reasons is kept for `explain` and RM_LOG=select.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "rm/kernels.h"
#include "select/problem.hpp"
#include "select/row_judge.hpp"

namespace rm::select {

struct Row {
  const rm_kernel* kernel = nullptr;
  const rm_device_info* device = nullptr;
  std::string backend;

  std::string_view name() const { return {kernel->name.data, kernel->name.size}; }
  /// Where its operands lie; the host without information about a device.
  DLDevice place() const;
  bool is_bridge() const { return (kernel->traits & RM_KERNEL_BRIDGE) != 0; }
};

struct Selection {
  const Row* row = nullptr;
  uint32_t config = 0;
  std::vector<std::string> reasons;  // "gemm_onednn_cpu: oneDNN not found", in table order
};

/// A row that was chosen and turned out not to serve.
struct Refusal {
  const Row* row;
  std::string why;
  bool judged = false;  // by the judge: a fault of the row
};

class KernelTable {
 public:
  /// `judge` is asked before a row is used; none: every row is trusted.
  explicit KernelTable(std::shared_ptr<RowJudge> judge = nullptr) : judge_(std::move(judge)) {}
  /// Appends a row; `kernel` and `device` must outlive the table (plugins are never unloaded).
  /// All rows of a table are for one device: throws rm::Error(RM_INVALID_ARGUMENT) for another.
  void add(std::string backend, const rm_kernel* kernel, const rm_device_info* device);
  /// Throws rm::Error(RM_UNIMPLEMENTED) with the reasons when no row supports the problem.
  /// Rows in `refused` are passed over.
  Selection select(const Problem& problem, std::string_view forced = {},
                   const std::vector<Refusal>& refused = {}) const;
  RowJudge* judge() const { return judge_.get(); }
  /// The device of the rows; the host where there are none.
  DLDevice device() const;
  bool has_rows(std::string_view op) const;
  /// What the device says of itself by that name (rm_device_info.properties), a whole number; 0 where it
  /// says nothing.
  int64_t property(std::string_view name) const;
  /// "backend/name" and digest of every row: goes into the cache key of what is compiled with it.
  std::string fingerprint() const;

 private:
  std::vector<const Row*> candidates(std::string_view op) const;

  std::shared_ptr<RowJudge> judge_;
  std::vector<std::unique_ptr<Row>> rows_;
  std::multimap<std::string, const Row*, std::less<>> by_op_;
};

}  // namespace rm::select
