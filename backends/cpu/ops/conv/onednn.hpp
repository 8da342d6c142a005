// conv through oneDNN's convolution and deconvolution, with channels last; bias, residual and
// activation are part of the primitive.
//
// The weight's layout is the library's choice for the problem. A weight that is no constant is put
// into it at every launch.
#pragma once

#include <optional>
#include <string>

#include "onednn/primitive.hpp"
#include "ops/conv/problem.hpp"
#include "rm/plugin.hpp"

namespace rm::cpu::conv {

class OneDnnConv {
 public:
  static const char* reject(const ConvProblem& c);

  /// Throws std::runtime_error when the library refuses the problem, or has only its plain loops.
  explicit OneDnnConv(ConvProblem problem);

  uint64_t workspace_bytes() const;
  bool packs(size_t operand) const { return operand == kW && c_.constant_w; }
  const char* layout(size_t) const { return layout_.c_str(); }
  uint64_t packed_bytes(size_t) const { return packed_bytes_; }
  void prepack(size_t, const rm_tensor& source, void* packed) const {
    pack(plugin::address(source), packed);
  }
  void launch(const rm_launch& l) const;

 private:
  void pack(const void* src, void* dst) const;
  onednn::Description describe_image(int64_t channels, const Triple& sizes) const;
  onednn::Description describe_weight(bool any) const;
  onednn::Description describe_bias() const;
  onednn::Attributes attributes() const;
  onednn::PrimitiveDescription describe_primitive(const_dnnl_memory_desc_t any_weight) const;

  ConvProblem c_;
  onednn::Description md_[kOperands];
  std::optional<onednn::Primitive> primitive_;
  uint64_t packed_bytes_ = 0, scratchpad_bytes_ = 0;
  std::string layout_;
};

}  // namespace rm::cpu::conv
