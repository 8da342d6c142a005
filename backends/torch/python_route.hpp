// Calls an operator through torch's Python bindings, for the argument types the stable C interface
// cannot encode.  Uses only CPython's stable ABI, found in the running process; takes the GIL for
// the call (torch gives it up again while it computes).
#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "encode.hpp"

namespace rm::torch_bridge {

class PythonCall {
 public:
  /// Binds rm_abstract.capture.aten_args.bind(op, schema_args, sym_args).
  PythonCall(std::string_view op, std::string_view schema_args, std::span<const int64_t> sym_args);
  ~PythonCall();
  PythonCall(const PythonCall&) = delete;
  PythonCall& operator=(const PythonCall&) = delete;

  /// `inputs` are the tensors by operand index; an absent operand is an empty Tensor.
  std::vector<Tensor> operator()(std::vector<Tensor> inputs) const;

 private:
  void* callable_ = nullptr;
};

}  // namespace rm::torch_bridge
