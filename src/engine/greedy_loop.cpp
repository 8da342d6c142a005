// See greedy_loop.hpp. The argmax reads logits once in blocks; the index is looked for in one
// block.
#include "engine/greedy_loop.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/error.hpp"
#include "ir/scalar.hpp"
#include "runtime/aligned_memory.hpp"

namespace rm::engine {
namespace {

constexpr auto kAskEvery = std::chrono::milliseconds(20);
constexpr int64_t kBlock = 512;
constexpr int64_t kLanes = 16;

// Outputs of all steps in the same memory.
class StepOutputs : public OutputAllocator {
 public:
  void* allocate(size_t index, const ir::Layout& layout) override {
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
  void reuse(size_t /*index*/, size_t /*input*/) override {}
  const void* data(size_t index) const { return memory_[index].get(); }
  const ir::Layout& layout(size_t index) const { return layouts_[index]; }

 private:
  std::vector<std::shared_ptr<void>> memory_;
  std::vector<ir::Layout> layouts_;
};

float widen(uint16_t bits) {
  uint32_t wide = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

// The largest value of a block; NaN when there is one.
float largest(const float* x, int64_t count) {
  float best[kLanes];
  std::fill(best, best + kLanes, -std::numeric_limits<float>::infinity());
  float odd = 0;  // NaN minus itself is NaN, and so is the sum
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (int64_t k = 0; k < kLanes; ++k) best[k] = x[i + k] > best[k] ? x[i + k] : best[k];
  }
  for (int64_t j = 0; j < i; ++j) odd += x[j] == x[j] ? 0.0f : 1.0f;
  float out = -std::numeric_limits<float>::infinity();
  for (float b : best) out = std::max(out, b);
  for (; i < count; ++i) {
    odd += x[i] == x[i] ? 0.0f : 1.0f;
    out = x[i] > out ? x[i] : out;
  }
  return odd > 0 ? std::numeric_limits<float>::quiet_NaN() : out;
}

const float* block_of(ir::DType dtype, const void* logits, int64_t at, int64_t count, float* room) {
  if (dtype == ir::DType::kF32) return static_cast<const float*>(logits) + at;
  const auto* bits = static_cast<const uint16_t*>(logits) + at;
  if (dtype == ir::DType::kBF16) {
    for (int64_t i = 0; i < count; ++i) room[i] = widen(bits[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) {
      room[i] = static_cast<float>(ir::load_element(dtype, bits + i));
    }
  }
  return room;
}

void check_roles(const std::vector<TensorView>& inputs, const GreedyRoles& roles, size_t rows) {
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
  check(roles.ids, rows, "ids");
  check(roles.positions, 1, "positions");
  check(roles.length, 1, "length");
  check(roles.mask, rows, "mask");
}

// What changes with every token, where it lies.
class StepMemory {
 public:
  StepMemory(const std::vector<TensorView>& inputs, const GreedyRoles& roles, size_t rows)
      : rows_(static_cast<int64_t>(rows)) {
    check_roles(inputs, roles, rows);
    auto view = [&](int number) -> const TensorView& {
      return inputs[static_cast<size_t>(number)];
    };
    auto memory = [&](int number) {
      return number < 0 ? nullptr : static_cast<int64_t*>(const_cast<void*>(view(number).data));
    };
    ids = memory(roles.ids);
    length = memory(roles.length);
    positions_ = memory(roles.positions);
    mask_ = memory(roles.mask);
    counted_ = positions_ == nullptr ? 0 : view(roles.positions).layout.num_elements();
    columns_ = mask_ == nullptr ? 0 : view(roles.mask).layout.dims.back();
  }

  // Before the program runs: the new position is attended to.
  void open() {
    if (mask_ == nullptr) return;
    if (*length >= columns_) throw_invalid("[greedy] expected room in the mask, got none");
    for (int64_t b = 0; b < rows_; ++b) mask_[b * columns_ + *length] = 1;
  }
  // After it ran: the position is part of the content.
  void close() {
    ++*length;
    for (int64_t i = 0; i < counted_; ++i) ++positions_[i];
  }

  int64_t* ids;
  int64_t* length;

 private:
  int64_t rows_, counted_ = 0, columns_ = 0;
  int64_t *positions_, *mask_;
};

}  // namespace

int64_t argmax(ir::DType dtype, const void* logits, int64_t count) {
  float room[kBlock];
  float best = 0;
  int64_t where = -1;
  for (int64_t at = 0; at < count; at += kBlock) {
    int64_t size = std::min(kBlock, count - at);
    float value = largest(block_of(dtype, logits, at, size, room), size);
    if (where >= 0 && !(value > best) && !std::isnan(value)) continue;
    best = value;
    where = at;
    if (std::isnan(value)) break;
  }
  if (where < 0) throw_invalid("[greedy] expected logits, got none");
  int64_t size = std::min(kBlock, count - where);
  const float* x = block_of(dtype, logits, where, size, room);
  for (int64_t i = 0; i < size; ++i) {
    if (x[i] == best || (std::isnan(best) && std::isnan(x[i]))) return where + i;
  }
  return where;
}

void decode_step(Program& program, const std::vector<TensorView>& inputs, const GreedyRoles& roles,
                 const std::vector<int64_t>& tokens, OutputAllocator& outputs) {
  StepMemory step(inputs, roles, tokens.size());
  std::copy(tokens.begin(), tokens.end(), step.ids);
  step.open();
  program.run(inputs, outputs);
  step.close();
}

GreedyResult decode_greedy(Program& program, const std::vector<TensorView>& inputs,
                           const GreedyRoles& roles, const GreedyLimits& limits,
                           std::vector<char>& finished, const std::function<Ask()>& ask) {
  if (limits.eos.size() != finished.size()) throw_invalid("[greedy] expected end tokens per row");
  StepMemory step(inputs, roles, finished.size());
  const int64_t rows = static_cast<int64_t>(finished.size());

  GreedyResult out;
  StepOutputs outputs;
  auto asked = std::chrono::steady_clock::now();
  while (out.count < limits.steps && *step.length < limits.capacity) {
    step.open();
    program.run(inputs, outputs);
    step.close();
    const auto logits = static_cast<size_t>(roles.logits);
    const ir::Layout& layout = outputs.layout(logits);
    const int64_t vocabulary = layout.dims.back();
    const auto item = static_cast<int64_t>(ir::size_bytes(layout.dtype));
    const auto* first = static_cast<const char*>(outputs.data(logits));
    bool all = true, ended = false;
    for (int64_t b = 0; b < rows; ++b) {
      auto row = static_cast<size_t>(b);
      int64_t next = finished[row] != 0
                         ? limits.pad
                         : argmax(layout.dtype, first + b * vocabulary * item, vocabulary);
      step.ids[b] = next;
      out.tokens.push_back(next);
      const std::vector<int64_t>& eos = limits.eos[row];
      if (finished[row] == 0 && std::find(eos.begin(), eos.end(), next) != eos.end()) {
        finished[row] = 1;
        ended = true;
      }
      all = all && finished[row] != 0;
    }
    ++out.count;
    if (all || (ended && limits.until_one_ends)) break;
    auto now = std::chrono::steady_clock::now();
    if (now - asked < kAskEvery) continue;
    asked = now;
    Ask answer = ask();
    out.interrupted = answer == Ask::kInterrupt;
    if (answer != Ask::kGoOn) break;
  }
  return out;
}

}  // namespace rm::engine
