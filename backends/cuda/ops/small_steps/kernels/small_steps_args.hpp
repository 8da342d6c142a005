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

struct SmallPart {
  SmallOp op;
  std::uint8_t rank, operands;
  std::int32_t a, b, size[kSmallRank];
  SmallPlace place[1 + kSmallOperands];  // the result first
};

struct SmallStepsArgs {
  int parts, slots;
  void* data[kSmallSlots];           // null: inner values, at `offset` in shared memory
  std::int32_t offset[kSmallSlots];  // bytes
  DType dtype[kSmallSlots];
  SmallPart part[kSmallParts];
  EwiseStep step[kSmallCode];
  double imm[kSmallCode];
};

}  // namespace rm::cuda_ops
