// Status, stream and the kernel table of an operator: what every api.hpp is written in.
// Rows are in order of preference; the last row of a table supports every legal problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <string>

#include "_shim/tensor_shim.hpp"

namespace rm::cuda_ops {

using Stream = cudaStream_t;

enum class Code { ok, invalid_argument, unsupported, no_device, device_error };

struct Status {
  Code code = Code::ok;
  std::string message;  // "[op] expected ..., got ...; try ..."
  explicit operator bool() const { return code == Code::ok; }
};

inline Status invalid(std::string message) { return {Code::invalid_argument, std::move(message)}; }
inline Status unsupported(std::string message) { return {Code::unsupported, std::move(message)}; }

/// The caller's scratch memory: device memory of at least the bytes asked for, 256-byte aligned.
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

/// One kernel of an operator over problems of type P.
template <class P>
struct KernelRow {
  const char* name;                  // "<op>_<algorithm>_<arch>"
  const char* range;                 // the problems it is for, for people
  const char* (*why_not)(const P&);  // null: supported; else a static reason
  double (*cost_us)(const P&);       // a rough estimate; only its order counts
  Status (*launch)(const P&, Workspace, Stream);
};

/// The cheapest row that supports the problem, or the row called `wanted`.
template <class P>
Status select_row(const char* op, std::span<const KernelRow<P>> rows, const P& problem,
                  const char* wanted, const KernelRow<P>** out) {
  const bool any = wanted == nullptr || *wanted == '\0';
  const KernelRow<P>* best = nullptr;
  double best_cost = 0;
  std::string reasons;
  for (const auto& row : rows) {
    if (!any && std::string(wanted) != row.name) continue;
    if (const char* why = row.why_not(problem)) {
      reasons += std::string(reasons.empty() ? "" : "; ") + row.name + ": " + why;
      continue;
    }
    const double cost = row.cost_us(problem);
    if (best == nullptr || cost < best_cost) {
      best = &row;
      best_cost = cost;
    }
  }
  if (best == nullptr) {
    if (reasons.empty()) reasons = "no kernel of that name";
    return unsupported(std::string("[") + op + "] expected a problem some kernel supports, got " +
                       (any ? "" : std::string(wanted) + ": ") + reasons +
                       "; try kernel=\"\" and look at kernels()");
  }
  *out = best;
  return {};
}

}  // namespace rm::cuda_ops
