// Reads a program of small steps into the kernel's arguments, and checks that it stays inside its values.
// Plain C++: tests run it without a GPU (tests/cuda/small_barriers.cpp).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "small_steps/api.hpp"
#include "small_steps/kernels/small_steps_args.hpp"

namespace rm::cuda_ops {

class SmallReader {
 public:
  SmallReader(const SmallSteps& p, SmallStepsArgs& out) : p_(p), out_(out) {}

  /// False where it is no program, or one that leaves its values.
  bool run();
  /// Shared memory of the inner values, in bytes.
  std::int64_t memory() const { return memory_; }
  /// Blocks of the launch.
  int blocks() const { return blocks_; }

 private:
  /// What the launcher knows of a place beside what the kernel is told.
  struct Seat {
    int slot = 0;
    std::int64_t offset = 0;  // in elements
  };
  struct Slot {
    DType dtype;
    char* data;  // null: an inner value, at `place` in shared memory
    std::int64_t place, elements;
  };

  struct Range {
    const char *begin, *end;
  };

  std::int64_t next() {
    if (at_ < p_.program.size()) return p_.program[at_++];
    failed_ = true;
    return 0;
  }
  bool read_values();
  bool read_part();
  bool read_places(SmallPart& part, const std::int64_t* sizes, std::int64_t a, std::int64_t b);
  bool read_place(SmallPart& part, int number, const std::int64_t* sizes);
  bool read_code(SmallPart& part, std::int64_t first, std::int64_t count);
  bool read_step(const EwiseInstruction& from, int registers, std::uint8_t* cls, SmallStep& step);
  bool fits(SmallPart& part, std::int64_t a, std::int64_t b);
  void read_reduction(SmallPart& part, int axes);
  void place_barriers();
  void share_out(int first, int last);
  Range range_of(int part, int number) const;
  void split_parts();
  bool stands_alone(int part) const;
  bool goes_with_split_parts(int part) const;
  static bool overlaps(const std::vector<Range>& many, const Range& one) {
    return std::any_of(many.begin(), many.end(), [&](const Range& r) { return r.begin < one.end && one.begin < r.end; });
  }
  bool keeps_to_itself(int writer, int reader, int operand) const;

  const SmallSteps& p_;
  SmallStepsArgs& out_;
  std::size_t at_ = 0;
  int rank_ = 0, slots_ = 0, blocks_ = 1;
  std::int64_t memory_ = 0;
  Slot slot_[kSmallSlots] = {};
  int kin_[kSmallParts] = {};  // parts of one number belong to the same warps
  Seat seat_[kSmallParts][1 + kSmallOperands] = {};
  bool failed_ = false;
};

}  // namespace rm::cuda_ops
