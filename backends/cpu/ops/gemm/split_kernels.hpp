// What the gemm of f32 on matrix tiles of bf16 (split.cpp) and its kernels (isa_split.cpp) agree on.
//
// Plain data and function pointers only, like tile.hpp.
#pragma once

#include "ops/gemm/tile.hpp"

namespace rm::cpu::gemm {

constexpr int kSplitSide = 32;   // rows of a strip; a block of sums is two strips'
constexpr int kSplitDepth = 32;  // values of k in a step
constexpr int kSplitParts = 3;   // bf16 numbers whose sum is an element
constexpr int64_t kSplitStepBytes = kSplitParts * kSplitSide * kSplitDepth * 2;
constexpr int64_t kSplitSums = kSplitSide * kSplitSide;

/// A strip: kSplitSide rows of an operand as its three parts, [step][part][half of the rows][tile], zeros behind
/// the last row and the last k. Element (row, k) lies at row * row_stride + k * k_stride.
struct SplitPack {
  const float* src;
  int64_t row_stride, k_stride, rows, k;
  char* dst;
};

/// Lines that are asked for meanwhile, some a step: `lines` of each of rows that lie `stride` bytes apart.
struct SplitAhead {
  const char* at = nullptr;  // the next line
  int64_t stride = 0, lines = 0, left = 0;  // left: of the row
  int64_t count = 0;                        // lines that are left
};

struct SplitArgs {
  const char *a, *b;  // a strip of rows of a, one of columns of b
  int64_t steps;
  float* sums;      // [kSplitSide][kSplitSide]
  bool accumulate;  // false: sums start from zero
  SplitAhead* written;  // lines that will be written next
  SplitAhead* read;     // lines that will be read later
  int64_t read_lines;   // a step
};

struct SplitSet {
  void (*open)();  // before a thread multiplies: its tiles' shapes
  void (*multiply)(const SplitArgs&);
  void (*close)();
  /// Rows of a and columns of b as tiles. Both return the bits of the largest magnitude: infinity's or above where
  /// not all are finite.
  uint32_t (*rows)(const SplitPack&);
  uint32_t (*columns)(const SplitPack&);
};

}  // namespace rm::cpu::gemm
