// Memory of one checked launch: random operands, results full of NaN, and guard bytes around all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ops/host_tensor.hpp"
#include "selfcheck/alike.hpp"

namespace rm::selfcheck {

/// Bytes between two guards. All of it starts as 0xff: NaN as a float, and no legal index.
class GuardedMemory {
 public:
  explicit GuardedMemory(size_t bytes);
  std::byte* data() { return block_.get() + kGuard; }
  const std::byte* data() const { return block_.get() + kGuard; }
  size_t size() const { return bytes_; }
  bool guards_intact() const;
  /// All of it, guards included: `data()` lies kGuard bytes behind the start.
  std::byte* block() { return block_.get(); }
  size_t block_bytes() const { return (bytes_ + 3 * kGuard - 1) / kGuard * kGuard; }
  static constexpr size_t kGuard = 256;

 private:
  size_t bytes_;
  std::unique_ptr<std::byte, void (*)(void*)> block_;
};

/// xorshift64*: the same numbers for the same seed on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u | 1) {}
  uint64_t next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1Du;
  }
  /// In [low, high].
  int64_t between(int64_t low, int64_t high) {
    return low + static_cast<int64_t>((next() >> 33) % static_cast<uint64_t>(high - low + 1));
  }

 private:
  uint64_t state_;
};

/// An operand as its kernel sees it, and as its reference does.
struct Filled {
  std::unique_ptr<GuardedMemory> memory;  // null: absent
  ops::HostTensor values;
  std::vector<int64_t> offsets;  // of every element in memory, row-major
};

/// Bytes from the first element of a view to behind its last.
size_t extent_bytes(const ir::Layout& layout);

/// Random values that are legal for the operator, in every input. Floats are multiples of a power of
/// two, small enough that sums of products are exact in f32 whatever their order.
std::vector<Filled> random_inputs(const Shape& shape, uint64_t seed);
/// Results before the launch. What a kernel updates in place (index_copy) holds random values.
std::vector<Filled> blank_outputs(const Shape& shape, uint64_t seed);
/// Reads `filled.values` back from the memory.
void read_back(Filled& filled);
/// False when a byte of the memory that is no element of the view has changed.
bool gaps_intact(const Filled& filled);

}  // namespace rm::selfcheck
