// A decoded rm_problem in the operator modules' own terms: tensors without addresses, attributes.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "_shim/epilogue_shim.hpp"
#include "rm/kernels.h"

namespace rm::cuda {

/// Why a problem is none for an operator module: the text is static.
class NotForModule : public std::exception {
 public:
  explicit NotForModule(const char* why) : why_(why) {}
  const char* what() const noexcept override { return why_; }

 private:
  const char* why_;
};

/// Throws NotForModule for a type or a rank that the modules do not have.
cuda_ops::Tensor tensor_of(const rm_tensor& t);

/// Throws NotForModule for an activation that the modules do not have.
cuda_ops::Activation activation_of(std::string_view name);

/// Of two tensors of one shape.
bool same_strides(const cuda_ops::Tensor& a, const cuda_ops::Tensor& b);

class Operands {
 public:
  explicit Operands(const rm_problem& p) : p_(p) {}

  /// Whether operand `i` is a weight, which never changes between two launches of a plan.
  bool is_constant(size_t i) const { return i < 64 && (p_.constant_inputs >> i & 1) != 0; }
  bool has_input(size_t i) const { return i < p_.num_inputs && p_.inputs[i] != nullptr; }
  bool has_output(size_t i) const { return i < p_.num_outputs && p_.outputs[i] != nullptr; }
  size_t num_inputs() const { return p_.num_inputs; }
  cuda_ops::Tensor input(size_t i) const;
  cuda_ops::Tensor output(size_t i) const;

  int64_t attr_int(std::string_view name, int64_t otherwise) const;
  double attr_float(std::string_view name, double otherwise) const;
  std::string_view attr_string(std::string_view name, std::string_view otherwise) const;
  std::vector<int64_t> attr_ints(std::string_view name) const;
  std::vector<double> attr_floats(std::string_view name) const;

 private:
  const rm_attr* find(std::string_view name) const;
  const rm_problem& p_;
};

}  // namespace rm::cuda
