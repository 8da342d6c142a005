// conv through oneDNN's convolution and deconvolution, with channels last; bias, residual and
// activation are part of the primitive.
//
// The weight's layout is the library's choice for the problem. A weight that is no constant is put
// into it at every launch.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/conv/problem.hpp"
#include "ops/gemm/onednn_api.hpp"

namespace rm::cpu::conv {

class OneDnnConv {
 public:
  static const char* reject(const ConvProblem& c);

  /// Throws std::runtime_error when the library refuses the problem, or has only its plain loops.
  explicit OneDnnConv(ConvProblem problem);
  ~OneDnnConv();
  OneDnnConv(const OneDnnConv&) = delete;
  OneDnnConv& operator=(const OneDnnConv&) = delete;

  uint64_t workspace_bytes() const;
  bool prepacked() const { return c_.constant_w; }
  const char* layout() const { return layout_.c_str(); }
  uint64_t packed_bytes() const { return packed_bytes_; }
  void prepack(const void* src, void* dst) const;
  void launch(const rm_launch& l) const;

 private:
  using Handle = gemm::onednn::Handle;
  /// Memory objects carry the data pointers of one launch, so concurrent launches need their own.
  struct Slot {
    std::vector<gemm::onednn::Argument> arguments;
    Handle stream = nullptr;
    Slot() = default;
    ~Slot();
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;
  };
  struct Unprepared {};
  // Once this constructor has returned, the destructor frees what the other one made before it threw.
  OneDnnConv(ConvProblem problem, Unprepared) : c_(std::move(problem)) {}

  Handle describe_image(int64_t channels, const Triple& sizes) const;
  Handle describe_weight(bool any) const;
  Handle describe_bias() const;
  Handle attributes();
  void create_primitive(Handle any_weight, Handle attributes);
  std::unique_ptr<Slot> make_slot() const;
  std::unique_ptr<Slot> take_slot() const;

  ConvProblem c_;
  Handle md_[kOperands] = {};  // owned
  Handle weights_ = nullptr;   // layout used; owned by the primitive's description
  Handle description_ = nullptr, primitive_ = nullptr, scratchpad_ = nullptr;
  int residual_argument_ = 0;
  uint64_t packed_bytes_ = 0, scratchpad_bytes_ = 0;
  std::string layout_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Slot>> free_slots_;
};

}  // namespace rm::cpu::conv
