// What a loop over a program keeps between two steps: outputs, and the tensors of the roles.
#pragma once

#include <memory>
#include <vector>

#include "generation/greedy_loop.hpp"

namespace rm::generation {

/// Outputs of all steps in the same memory.
class StepOutputs : public engine::OutputAllocator {
 public:
  void* allocate(size_t index, const ir::Layout& layout) override;
  void reuse(size_t /*index*/, size_t /*input*/) override {}
  const void* data(size_t index) const { return memory_[index].get(); }
  const ir::Layout& layout(size_t index) const { return layouts_[index]; }

 private:
  std::vector<std::shared_ptr<void>> memory_;
  std::vector<ir::Layout> layouts_;
};

/// The tensors of the roles, where they lie. Throws rm::Error when they are not what is expected.
class StepMemory {
 public:
  /// `width` tokens of each of `rows` rows go through the program at once.
  StepMemory(const std::vector<engine::TensorView>& inputs, const GreedyRoles& roles, size_t rows,
             size_t width = 1);

  /// Before the program runs: the next `count` positions are attended to.
  void open(int64_t count = 1) { mark(*length, count, 1); }
  /// After it ran: `count` positions more are part of the content.
  void close(int64_t count = 1);
  /// `count` positions behind the content are not attended to.
  void hide(int64_t count) { mark(*length, count, 0); }
  /// Both are told of the same length and mask.
  bool goes_with(const StepMemory& other) const {
    return length == other.length && mask_ == other.mask_ && !positions == !other.positions;
  }

  int64_t* ids;
  int64_t* length;
  int64_t* positions;   // null: the program has none
  int64_t counted = 0;  // of them

 private:
  void mark(int64_t from, int64_t count, int64_t value);

  int64_t rows_, columns_ = 0;
  int64_t* mask_;
};

}  // namespace rm::generation
