// See greedy_memory.hpp.
#include "generation/greedy_memory.hpp"

#include <algorithm>
#include <string>

#include "base/error.hpp"
#include "runtime/aligned_memory.hpp"

namespace rm::generation {
namespace {

void check_roles(const std::vector<engine::TensorView>& inputs, const GreedyRoles& roles, size_t ids) {
  auto check = [&](int number, size_t least, const char* what) {
    if (number < 0) return;
    if (static_cast<size_t>(number) >= inputs.size()) throw_invalid("[greedy] expected an input");
    const ir::Layout& l = inputs[static_cast<size_t>(number)].layout;
    if (l.dtype != ir::DType::kI64 || !l.is_contiguous() ||
        l.num_elements() < static_cast<int64_t>(least)) {
      throw_invalid(std::string("[greedy] expected dense 64-bit ") + what + ", got another tensor");
    }
  };
  if (roles.ids < 0 || roles.length < 0 || roles.logits < 0) {
    throw_invalid("[greedy] expected ids, length and logits, got none");
  }
  check(roles.ids, ids, "ids");
  check(roles.positions, 1, "positions");
  check(roles.length, 1, "length");
  check(roles.mask, 1, "mask");
}

}  // namespace

void* StepOutputs::allocate(size_t index, const ir::Layout& layout) {
  if (index >= memory_.size()) {
    memory_.resize(index + 1);
    layouts_.resize(index + 1);
  }
  if (memory_[index] == nullptr || layouts_[index].num_bytes() < layout.num_bytes()) {
    memory_[index] = runtime::allocate_host(static_cast<size_t>(layout.num_bytes()));
  }
  layouts_[index] = layout;
  return memory_[index].get();
}

StepMemory::StepMemory(const std::vector<engine::TensorView>& inputs, const GreedyRoles& roles, size_t rows,
                       size_t width)
    : rows_(static_cast<int64_t>(rows)) {
  check_roles(inputs, roles, rows * width);
  auto view = [&](int number) -> const engine::TensorView& { return inputs[static_cast<size_t>(number)]; };
  auto memory = [&](int number) {
    return number < 0 ? nullptr : static_cast<int64_t*>(const_cast<void*>(view(number).data));
  };
  ids = memory(roles.ids);
  length = memory(roles.length);
  positions = memory(roles.positions);
  mask_ = memory(roles.mask);
  counted = positions == nullptr ? 0 : view(roles.positions).layout.num_elements();
  columns_ = mask_ == nullptr ? 0 : view(roles.mask).layout.dims.back();
  if (mask_ != nullptr && view(roles.mask).layout.num_elements() < rows_ * columns_) {
    throw_invalid("[greedy] expected a mask for every row, got a smaller one");
  }
}

void StepMemory::mark(int64_t from, int64_t count, int64_t value) {
  if (mask_ == nullptr) return;
  if (from + count > columns_) throw_invalid("[greedy] expected room in the mask, got none");
  for (int64_t b = 0; b < rows_; ++b) {
    std::fill_n(mask_ + b * columns_ + from, count, value);
  }
}

void StepMemory::close(int64_t count) {
  *length += count;
  for (int64_t i = 0; i < counted; ++i) positions[i] += count;
}

}  // namespace rm::generation
