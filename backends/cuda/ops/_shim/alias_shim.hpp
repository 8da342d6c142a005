// Which tensors of a call may share memory: one rule for all operators. A result is written once an
// element, and lies apart from every other result, from the workspace and from every operand, but
// for those operands of which an operator says that it may work in place.
#pragma once

#include <initializer_list>
#include <span>

#include "_shim/op_schema_shim.hpp"

namespace rm::cuda_ops {

/// A tensor of a call and its name; a null tensor is an operand that was not given.
struct Operand {
  const char* name;
  const Tensor* tensor;
  /// Of a result and of an operand: the two may be the same view (address, shape, strides).
  bool in_place = false;
};

/// No two index tuples reach the same byte. Layouts whose axes interleave without an order, which
/// no view of a dense tensor has, count as if they overlapped.
bool lies_apart_from_itself(const Tensor& t);

/// No byte belongs to both. Exact for ranges that do not meet and for views of one buffer that
/// differ by columns, heads, rows or steps; anything else that meets counts as shared.
bool lie_apart(const Tensor& a, const Tensor& b);

/// Refuses what the rule above forbids; the message names the two tensors.
Status check_memory(const char* op, std::span<const Operand> results,
                    std::span<const Operand> operands, const Workspace& workspace = {});

inline Status check_memory(const char* op, std::initializer_list<Operand> results,
                           std::initializer_list<Operand> operands,
                           const Workspace& workspace = {}) {
  return check_memory(op, std::span(results.begin(), results.size()),
                      std::span(operands.begin(), operands.size()), workspace);
}

/// The same rule for many dense tensors, none of them in place, in n log n steps.
Status check_many_dense(const char* op, std::span<const Operand> results,
                        std::span<const Operand> operands);

}  // namespace rm::cuda_ops
