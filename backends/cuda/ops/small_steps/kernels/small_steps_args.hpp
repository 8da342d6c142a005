// What the kernel of small steps is launched with; all of it travels by value.
#pragma once

#include <cstdint>

#include "ewise/kernels/ewise_args.hpp"

namespace rm::cuda_ops {

inline constexpr int kSmallParts = 24, kSmallSlots = 40, kSmallRank = 4, kSmallOperands = 8;
inline constexpr int kSmallCode = 96, kSmallBytes = 32 << 10;

enum class SmallOp : std::uint8_t { ewise, reduce, softmax, gather };

struct SmallPlace {
  std::uint8_t slot;
  std::int32_t offset, stride[kSmallRank];
};

struct alignas(16) SmallPart {
  SmallOp op;
  std::uint8_t rank, operands;
  std::int32_t a, b, count, size[kSmallRank];
  float share[kSmallRank];               // 1 / size
  SmallPlace place[1 + kSmallOperands];  // the result first
};

/// `direct`: its operands are registers of its class.
struct alignas(16) SmallStep {
  EwiseStep step;
  std::int16_t direct;
};

/// What all threads read all the time; it is copied to shared memory first.
struct alignas(16) SmallProgram {
  SmallPart part[kSmallParts];
  SmallStep step[kSmallCode];
  double imm[kSmallCode];
};

struct SmallStepsArgs {
  int parts, slots, steps;
  void* data[kSmallSlots];           // null: inner values, at `offset` in shared memory
  std::int32_t offset[kSmallSlots];  // bytes
  DType dtype[kSmallSlots];
  SmallProgram program;
};

}  // namespace rm::cuda_ops
