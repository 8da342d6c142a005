// A problem that owns its arrays: layouts and attributes turned into the C structs of kernels.h.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ir/graph.hpp"
#include "ir/layout.hpp"
#include "rm/kernels.h"

namespace rm::select {

struct Operand {
  bool present = true;
  ir::Layout layout;
  bool constant = false;  // its values never change: a weight
};

class Problem {
 public:
  Problem(std::string op, const std::vector<Operand>& inputs, const std::vector<Operand>& outputs,
          const ir::Attrs& attrs, DLDevice device = {kDLCPU, 0});
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const rm_problem& c() const { return problem_; }
  const rm_tensor& input(size_t i) const { return *problem_.inputs[i]; }
  const ir::Attrs& attrs() const { return attr_storage_; }
  /// Equal keys mean equal problems (shapes, strides, attributes, which operands are constant).
  const std::string& key() const { return key_; }
  /// One line for logs: "gemm f32[8,384] f32[1536,384] -> f32[8,1536]".
  std::string str() const;

 private:
  void add_tensor(const Operand& operand, std::vector<const rm_tensor*>& list);
  void add_attr(const std::string& name, const ir::Attr& attr);

  std::string op_, key_;
  const DLDevice device_;
  std::vector<std::unique_ptr<rm_tensor>> tensors_;
  std::vector<std::unique_ptr<ir::Ints>> ints_;
  std::vector<const rm_tensor*> inputs_, outputs_;
  ir::Attrs attr_storage_;
  std::vector<rm_attr> attrs_;
  rm_problem problem_{};
};

}  // namespace rm::select
