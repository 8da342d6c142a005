// gemm through oneDNN's matmul, the epilogue as post-operations.
//
// The weight's layout is the library's choice for the shape; layout() spells it out, so equal
// layouts share one packed copy.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ops/gemm/onednn_api.hpp"
#include "ops/gemm/problem.hpp"
#include "rm/kernels.h"

namespace rm::cpu::gemm {

class OneDnnGemm {
 public:
  static const char* reject(const GemmProblem& g);

  /// Throws std::runtime_error when the library refuses the problem.
  explicit OneDnnGemm(GemmProblem problem);
  ~OneDnnGemm();
  OneDnnGemm(const OneDnnGemm&) = delete;
  OneDnnGemm& operator=(const OneDnnGemm&) = delete;

  uint64_t workspace_bytes() const { return workspace_bytes_; }
  bool prepacked() const { return g_.constant_b; }
  const char* layout() const { return layout_.c_str(); }
  uint64_t packed_bytes() const { return packed_bytes_; }
  void prepack(const void* src, void* dst) const;
  void launch(const rm_launch& l) const;

 private:
  /// Memory objects carry the data pointers of one launch, so concurrent launches need their own.
  struct Slot {
    std::vector<onednn::Argument> arguments;
    onednn::Handle stream = nullptr;
    Slot() = default;
    ~Slot();
    Slot(const Slot&) = delete;
    Slot& operator=(const Slot&) = delete;
  };
  struct Unprepared {};
  // Once this constructor has returned, the destructor frees what the other one made before it threw.
  OneDnnGemm(GemmProblem problem, Unprepared) : g_(std::move(problem)) {}

  std::vector<int64_t> dims(int64_t rows, int64_t cols, bool shared) const;
  onednn::Handle describe(Operand o, int64_t rows, int64_t cols) const;
  onednn::Handle attributes();
  void name_layout(onednn::Handle weights);
  std::unique_ptr<Slot> make_slot() const;
  std::unique_ptr<Slot> take_slot() const;

  GemmProblem g_;
  onednn::Handle md_[kOperands] = {};  // owned, but for the packed weight's
  onednn::Handle weights_ = nullptr;   // layout used; owned by the primitive's description
  onednn::Handle description_ = nullptr, primitive_ = nullptr, scratchpad_ = nullptr;
  int residual_argument_ = 0;
  uint64_t packed_bytes_ = 0, workspace_bytes_ = 0;
  std::string layout_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Slot>> free_slots_;
};

}  // namespace rm::cpu::gemm
