// Status, stream and the kernel table of an operator: what every api.hpp is written in.
// Rows are in order of preference; the last row of a table supports every legal problem.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

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

inline constexpr std::size_t kWorkspaceAlignment = 256;

/// Enough bytes, at an address from which kernels may read in vectors; `how` names the function
/// that says how many. See error_shim.cpp.
Status check_workspace(const char* op, std::size_t needed, const Workspace& w,
                       const char* how = "backward_workspace()");

/// One kernel of an operator over problems of type P.
template <class P>
struct KernelRow {
  const char* name;                  // "<op>_<algorithm>_<arch>"
  const char* range;                 // the problems it is for, for people
  const char* (*why_not)(const P&);  // null: supported; else a static reason
  double (*cost_us)(const P&);       // a rough estimate; only its order counts
  Status (*launch)(const P&, Workspace, Stream);
};

/// A message in parts; one function, where every `+` would be code of its own.
inline std::string text_of(std::initializer_list<std::string_view> parts) {
  std::string out;
  for (const std::string_view part : parts) out += part;
  return out;
}

inline Status no_row(const char* op, std::string_view wanted, std::string_view reasons) {
  return unsupported(
      text_of({"[", op, "] expected a problem some kernel supports, got ", wanted,
               wanted.empty() ? "" : ": ", reasons.empty() ? "no kernel of that name" : reasons,
               "; try kernel=\"\" and look at kernels()"}));
}

/// An error that an earlier call left on this thread is not the next launch's. One that ended the
/// context is reported as such; any other is dropped: who made it has seen its own return value.
Status earlier_error(const char* op);

/// The cheapest row that supports the problem, or the row called `wanted`.
template <class P>
Status select_row(const char* op, std::span<const KernelRow<P>> rows, const P& problem,
                  const char* wanted, const KernelRow<P>** out) {
  if (Status s = earlier_error(op); !s) return s;
  const std::string_view name = wanted == nullptr ? "" : wanted;
  const KernelRow<P>* best = nullptr;
  double best_cost = 0;
  for (const auto& row : rows) {
    if ((!name.empty() && name != row.name) || row.why_not(problem)) continue;
    const double cost = row.cost_us(problem);
    if (best == nullptr || cost < best_cost) best = &row, best_cost = cost;
  }
  *out = best;
  if (best != nullptr) return {};
  std::string reasons;
  for (const auto& row : rows) {
    if (!name.empty() && name != row.name) continue;
    reasons += text_of({reasons.empty() ? "" : "; ", row.name, ": ", row.why_not(problem)});
  }
  return no_row(op, name, reasons);
}

}  // namespace rm::cuda_ops
