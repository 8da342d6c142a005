// Convolutions by tiles of our own, with channels last and any other strides: every geometry, f32,
// bf16 and f16. Serves where no library is, and depthwise kernels.
//
// Every element of y is one chain of multiply-adds in the order kernel, channel, so neither tiles nor
// threads change a bit of it.
#pragma once

#include <string>
#include <vector>

#include "isa.hpp"
#include "ops/conv/direct_kernels.hpp"
#include "ops/conv/problem.hpp"
#include "rm/plugin.hpp"

namespace rm::cpu::conv {

class DirectConv {
 public:
  static const char* reject(const ConvProblem& c);
  DirectConv(ConvProblem problem, const DirectSet& set);

  uint64_t workspace_bytes() const;
  bool packs(size_t operand) const { return operand == kW && c_.constant_w; }
  const char* layout(size_t) const { return layout_.c_str(); }
  uint64_t packed_bytes(size_t) const { return packed_bytes(); }
  void prepack(size_t, const rm_tensor& source, void* packed) const {
    pack(plugin::address(source), packed);
  }
  void launch(const rm_launch& l) const;

 private:
  uint64_t packed_bytes() const;
  void pack(const void* src, void* dst) const;
  int64_t taps() const { return c_.k[0] * c_.k[1] * c_.k[2]; }
  int64_t places() const { return c_.y[0] * c_.y[1] * c_.y[2]; }
  uint64_t thread_bytes() const;
  void find_taps(const char* x, int64_t place, int64_t pixel, int64_t pixels,
                 const void** taps) const;
  int64_t offset(Operand o, int64_t n, int64_t place) const;
  void run_tile(const rm_launch& l, const float* weights, int64_t task, char* scratch) const;
  void run_depthwise(const rm_launch& l, const float* weights, int64_t task, char* scratch) const;
  void store(const rm_launch& l, int64_t n, int64_t place, int64_t channel, int64_t channels,
             const float* sums) const;

  ConvProblem c_;
  const DirectSet& set_;
  const DirectKernels& k_;
  bool depthwise_;
  int64_t bytes_;           // of an element
  int64_t lanes_, panels_;  // of a whole panel; panels of a group
  int64_t pixels_, tiles_;  // places of a tile; tiles of an image
  // By axis, place of y and element of the kernel: bytes from the start of x's axis; -1: nowhere.
  std::vector<int64_t> meets_[3];
  std::vector<char> zeros_;  // channels of a place outside of x
  std::string layout_;
};

}  // namespace rm::cpu::conv
