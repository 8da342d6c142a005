// See greedy_loop.hpp. The argmax reads logits once in blocks; the index is looked for in one
// block.
#include "generation/greedy_loop.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#include "base/error.hpp"
#include "generation/draft_check.hpp"
#include "generation/greedy_memory.hpp"
#include "ir/scalar.hpp"

namespace rm::generation {
namespace {

constexpr auto kPollEvery = std::chrono::milliseconds(20);
constexpr int64_t kBlock = 512;
constexpr int64_t kLanes = 16;

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

// bfloat16 as integers in the order of the values; -0 below 0, NaNs beyond the infinities.
int16_t ordered(uint16_t bits) {
  const auto s = static_cast<int16_t>(bits);
  return static_cast<int16_t>(s ^ ((s >> 15) & 0x7fff));
}

// argmax of bfloat16, eight values an operation; -1 where the largest is a zero, of either sign, or
// there is a NaN.
int64_t argmax_bf16(const uint16_t* x, int64_t count) {
  constexpr int16_t kInfinity = 0x7f80;
  int16_t best = std::numeric_limits<int16_t>::min();
  int64_t where = 0;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t end = std::min(at + kBlock, count);
    int16_t high = std::numeric_limits<int16_t>::min(), low = std::numeric_limits<int16_t>::max();
    for (int64_t i = at; i < end; ++i) {
      high = std::max(high, ordered(x[i]));
      low = std::min(low, ordered(x[i]));
    }
    if (high > kInfinity || low < -kInfinity - 1) return -1;
    if (high > best) best = high, where = at;
  }
  if (best == 0 || best == -1) return -1;
  while (ordered(x[where]) != best) ++where;
  return where;
}

// Passes allocations on and keeps where the logits are.
class LogitsSeen final : public engine::OutputAllocator {
 public:
  LogitsSeen(engine::OutputAllocator& to, size_t logits) : to_(to), logits_(logits) {}

  void* allocate(size_t index, const ir::Layout& layout) override {
    void* data = to_.allocate(index, layout);
    if (index == logits_) data_ = data, layout_ = layout;
    return data;
  }
  void reuse(size_t index, size_t input) override { to_.reuse(index, input); }

  // The first largest of every row.
  std::vector<int64_t> largest(size_t rows) const {
    std::vector<int64_t> out;
    if (data_ == nullptr || !layout_.is_contiguous() || layout_.dims.empty()) return out;
    const int64_t vocabulary = layout_.dims.back();
    if (layout_.num_elements() != static_cast<int64_t>(rows) * vocabulary) return out;
    const auto row_bytes = static_cast<size_t>(vocabulary) * ir::size_bytes(layout_.dtype);
    for (size_t row = 0; row < rows; ++row) {
      out.push_back(argmax(layout_.dtype, static_cast<const char*>(data_) + row * row_bytes, vocabulary));
    }
    return out;
  }

 private:
  engine::OutputAllocator& to_;
  size_t logits_;
  const void* data_ = nullptr;
  ir::Layout layout_;
};

// The program over one token of every row. When it throws, the next position is hidden again.
void run_once(engine::Program& program, const std::vector<engine::TensorView>& inputs,
              engine::OutputAllocator& outputs, StepMemory& step) {
  step.open();
  try {
    program.run(inputs, outputs);
  } catch (...) {
    step.hide(1);
    throw;
  }
  step.close();
}

// One token of every row. True when the loop is over.
bool plain_step(engine::Program& program, const std::vector<engine::TensorView>& inputs, const GreedyRoles& roles,
                const GreedyLimits& limits, StepMemory& step, StepOutputs& outputs,
                GreedyResult& out, std::vector<char>& finished) {
  run_once(program, inputs, outputs, step);
  const auto logits = static_cast<size_t>(roles.logits);
  const ir::Layout& layout = outputs.layout(logits);
  const int64_t vocabulary = layout.dims.back();
  const auto item = static_cast<int64_t>(ir::size_bytes(layout.dtype));
  const auto* first = static_cast<const char*>(outputs.data(logits));
  bool all = true, ended = false;
  for (size_t row = 0; row < finished.size(); ++row) {
    const auto b = static_cast<int64_t>(row);
    int64_t next = finished[row] != 0
                       ? limits.pad
                       : argmax(layout.dtype, first + b * vocabulary * item, vocabulary);
    step.ids[b] = next;
    out.tokens.push_back(next);
    if (finished[row] == 0 && is_end(limits, row, next)) {
      finished[row] = 1;
      ended = true;
    }
    all = all && finished[row] != 0;
  }
  ++out.count;
  return all || (ended && limits.until_one_ends);
}

// Gives the tokens from `before` on to the caller. True when it accepted no more than some of them;
// the others are taken back.
bool deliver(const GreedyHooks& hooks, StepMemory& step, int64_t before, GreedyResult& out) {
  const std::vector<int64_t> fresh(out.tokens.begin() + before, out.tokens.end());
  if (fresh.empty()) return false;
  const int64_t accepted = hooks.on_tokens(fresh);
  if (accepted < 0) return false;
  const int64_t left = out.count - before - accepted;
  if (left < 0) throw_invalid("[greedy] expected no more tokens to be accepted than there were");
  step.close(-left);
  step.hide(left);
  out.tokens.resize(static_cast<size_t>(before + accepted));
  out.count -= left;
  return true;
}

}  // namespace

bool is_end(const GreedyLimits& limits, size_t row, int64_t token) {
  const std::vector<int64_t>& eos = limits.eos[row];
  return std::find(eos.begin(), eos.end(), token) != eos.end();
}

bool stands_out(ir::DType dtype, const void* logits, int64_t count, int64_t winner, double margin) {
  float room[kBlock];
  float second = -std::numeric_limits<float>::infinity(), size = 0, best = 0;
  for (int64_t at = 0; at < count; at += kBlock) {
    const int64_t in_block = std::min(kBlock, count - at);
    const float* x = block_of(dtype, logits, at, in_block, room);
    const bool here = winner >= at && winner < at + in_block;
    if (here) best = x[winner - at];
    for (int64_t i = 0; i < in_block; ++i) size = std::max(size, std::fabs(x[i]));
    const int64_t cut = here ? winner - at : in_block;  // the others lie before and behind it
    const float left = largest(x, cut);
    const float right = here ? largest(x + cut + 1, in_block - cut - 1) : left;
    if (std::isnan(left) || std::isnan(right)) return false;
    second = std::max({second, left, right});
  }
  return static_cast<double>(best) - static_cast<double>(second) >
         margin * static_cast<double>(size);
}

int64_t argmax(ir::DType dtype, const void* logits, int64_t count) {
  if (dtype == ir::DType::kBF16 && count > 0) {
    const int64_t found = argmax_bf16(static_cast<const uint16_t*>(logits), count);
    if (found >= 0) return found;
  }
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

std::vector<int64_t> decode_step(engine::Program& program, const std::vector<engine::TensorView>& inputs,
                                 const GreedyRoles& roles, const std::vector<int64_t>& tokens,
                                 engine::OutputAllocator& outputs) {
  StepMemory step(inputs, roles, tokens.size());
  std::copy(tokens.begin(), tokens.end(), step.ids);
  LogitsSeen seen(outputs, static_cast<size_t>(roles.logits));
  run_once(program, inputs, seen, step);
  return seen.largest(tokens.size());
}

GreedyResult decode_greedy(engine::Program& program, const std::vector<engine::TensorView>& inputs,
                           const GreedyRoles& roles, const GreedyLimits& limits,
                           std::vector<char>& finished, const GreedyHooks& hooks) {
  if (limits.eos.size() != finished.size()) throw_invalid("[greedy] expected end tokens per row");
  if (hooks.on_tokens && finished.size() != 1) throw_invalid("[greedy] expected one row to deliver");
  StepMemory step(inputs, roles, finished.size());
  std::optional<DraftCheck> drafts;
  if (hooks.drafting != nullptr) drafts.emplace(*hooks.drafting, step, limits, finished.size());

  GreedyResult out;
  StepOutputs outputs;
  auto polled = std::chrono::steady_clock::now();
  bool over = false;
  while (!over && out.count < limits.steps && *step.length < limits.capacity) {
    const size_t width = drafts ? drafts->plan(limits.steps - out.count) : 1;
    if (width == 0) {
      out.wants_checks = true;
      break;
    }
    const int64_t before = out.count;
    auto started = std::chrono::steady_clock::now();
    try {
      if (width > 1) {
        over = drafts->run(limits.steps - before, out, finished);
      } else {
        over = plain_step(program, inputs, roles, limits, step, outputs, out, finished);
        if (drafts) drafts->plain(outputs, roles, out.tokens.back());
      }
    } catch (const Error& error) {
      if (error.code() != RM_OUT_OF_RANGE) throw;
      break;  // it refuses values of this step, which is not made; those before it are
    }
    auto now = std::chrono::steady_clock::now();
    if (drafts) {
      drafts->ran(std::chrono::duration<double, std::nano>(now - started).count(), out);
    }
    if (hooks.on_tokens) over = deliver(hooks, step, before, out) || over;
    if (over || now - polled < kPollEvery) continue;
    polled = now;
    Poll answer = hooks.poll();
    out.interrupted = answer == Poll::kInterrupt;
    over = answer != Poll::kContinue;
  }
  return out;
}

}  // namespace rm::generation
