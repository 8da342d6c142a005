// A decoded rm_problem: element types, views with strides, attributes.
//
// Everything here is built for the plain architecture; ISA sources take plain structs of pointers
// and sizes instead (they may include only the POD part, common/types.hpp).
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/types.hpp"
#include "rm/kernels.h"

namespace rm::cpu {

int64_t dtype_bytes(DType t);
const char* dtype_name(DType t);
DType to_dtype(DLDataType t);
inline bool is_float(DType t) {
  return t == DType::f32 || t == DType::f64 || t == DType::bf16 || t == DType::f16;
}
/// f32, bf16 and f16: what is computed in f32.
inline bool is_float32_class(DType t) { return is_float(t) && t != DType::f64; }

struct View {
  DType dtype = DType::invalid;
  std::vector<int64_t> shape, stride;  // elements
  int rank() const { return static_cast<int>(shape.size()); }
  int64_t numel() const;
  int64_t dim(int axis) const { return shape[axis < 0 ? axis + rank() : axis]; }
  int64_t step(int axis) const { return stride[axis < 0 ? axis + rank() : axis]; }
};

class Problem {
 public:
  explicit Problem(const rm_problem& p) : p_(p) {}
  const rm_problem& raw() const { return p_; }

  size_t num_inputs() const { return p_.num_inputs; }
  size_t num_outputs() const { return p_.num_outputs; }
  bool has_input(size_t i) const { return i < p_.num_inputs && p_.inputs[i]; }
  bool has_output(size_t i) const { return i < p_.num_outputs && p_.outputs[i]; }
  View input(size_t i) const;  // throws std::invalid_argument when absent
  View output(size_t i) const;

  int64_t attr_int(std::string_view name, int64_t otherwise) const;
  double attr_float(std::string_view name, double otherwise) const;
  std::string_view attr_string(std::string_view name, std::string_view otherwise) const;
  std::vector<int64_t> attr_ints(std::string_view name) const;
  std::vector<double> attr_floats(std::string_view name) const;

 private:
  const rm_attr* find(std::string_view name) const;
  const rm_problem& p_;
};

/// An axis in [0, rank), negative ones counted from the end; throws std::invalid_argument.
int normal_axis(int64_t axis, int rank);

/// The loop nest over one shape and the strides of several operands: size-1 axes dropped and
/// neighbours merged where every operand allows it. The last axis is the innermost.
struct Nest {
  std::vector<int64_t> shape;
  std::vector<std::vector<int64_t>> strides;  // [operand][axis]
  int64_t numel() const;
  int rank() const { return static_cast<int>(shape.size()); }
};
/// `sort_by` >= 0 first orders the axes by that operand's strides, largest outermost: legal
/// whenever the order of visits does not matter.
Nest make_nest(std::vector<int64_t> shape, std::vector<std::vector<int64_t>> strides, int sort_by);

}  // namespace rm::cpu
