// What the kernel of small steps is launched with; all of it travels by value.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ewise/kernels/ewise_args.hpp"
#include "ewise/opcodes.hpp"

namespace rm::cuda_ops {

inline constexpr int kSmallParts = 24, kSmallSlots = 40, kSmallRank = 4, kSmallOperands = 8;
inline constexpr int kSmallThreads = 512;  // 256 and 1024 are slower: waits, and threads without an element
inline constexpr int kSmallCode = 96, kSmallBytes = 32 << 10;
inline constexpr int kSmallBlocks = 16;  // that share elements, at most

enum class SmallOp : std::uint8_t { ewise, reduce, softmax, gather };

/// Where a part's value lies, found by one load: element e of an even place at data + e * step, others
/// at data plus coordinates times strides. In elements.
struct alignas(16) SmallPlace {
  char* data;  // of inner values an offset in shared memory, until the kernel adds where that is
  DType dtype;
  std::uint8_t even, inner;
  std::int32_t step;
  std::int32_t stride[kSmallRank];
};

/// What every thread reads of a part first.
struct alignas(16) SmallHead {
  SmallOp op;
  std::uint8_t operands;
  std::uint8_t meet;    // a barrier stands before it
  std::uint8_t uneven;  // a place is not even
  std::uint8_t kind;    // reduce: which; softmax: log
  std::uint8_t steps, cls;  // ewise: how many instructions, the class of the last
  std::uint8_t warp, warps;  // whose it is: so many from this one on, around the block
  std::uint8_t split;       // ewise: all blocks share its elements; other parts are the first block's
  std::uint16_t count;      // elements; of a reduction its results
  std::int32_t first;       // ewise: instruction; reduce: values of a result; gather: what is looked into
};

struct SmallPart {
  SmallHead head;
  std::int32_t size[kSmallRank];
  float share[kSmallRank];  // 1 / size
  std::int32_t axes;        // reduce: bits; gather: the axis
  std::int32_t from, to, along;  // of an even reduction: steps of its results and of what each sums
  SmallPlace place[1 + kSmallOperands];  // the result first
};

/// Instructions of f32 that need no call, in the order of the kernel's table.
enum class SmallCode : std::uint8_t {
  add, sub, mul, div, neg, copy, where, eq, ne, lt, le, gt, ge, exp, log, relu, maximum, minimum, fma, constant,
  both, either, negated, whole_eq, whole_ne, whole_lt, whole_le, whole_gt, whole_ge, whole_add, whole_sub, other
};

/// Classes of values: 0 f32 and bool, 1 f64, 2 integers. The last two are asked for by `other` alone.
struct alignas(16) SmallStep {
  SmallCode code;
  std::uint8_t a, b, c;      // registers
  std::uint8_t cls, of[3];   // its own and its operands' classes
  std::uint64_t bits;        // of a constant; else the opcode
};

/// What all threads read all the time; it is copied to shared memory first.
struct alignas(16) SmallProgram {
  SmallPart part[kSmallParts];
  SmallStep step[kSmallCode];
};

struct SmallStepsArgs {
  int parts, steps;
  const void* first;  // an operand
  SmallProgram program;
};

/// Whether values of the type are f32 in a register.
__host__ __device__ inline bool small_is_real(DType dtype) {
  return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16 || dtype == DType::boolean;
}

/// Comparisons of any class and logical operations of f32 and f64: 0 or 1, in f32.
__host__ __device__ inline bool small_gives_bool(int opcode, int cls) {
  const bool joins = opcode >= kAnd && opcode <= kXor;
  return opcode == kLogicalNot || opcode == kIsNan || (opcode >= kEq && opcode <= kGe) || (joins && cls != 2);
}

}  // namespace rm::cuda_ops
