// What quant_linear of a few rows (few.cpp) and its kernels (isa_few.cpp, on matrix tiles
// isa_amx_few.cpp) agree on. Plain data and function pointers only.
#pragma once

#include "ops/quant/tile.hpp"

namespace rm::cpu::quant {

constexpr int kStrip = 2 * kTile;  // rows of the weight that are multiplied at once
constexpr int64_t kMostFewRows = 16;  // of x: what a matrix tile holds, and docs/operators.md lets round

/// acc[r][c] = row r of x . row c of the weight, of kStrip rows in two tiles.
struct FewArgs {
  const int8_t* x;      // [block][rows][kBlock]
  const float* scales;     // [block][rows]
  const int32_t* offsets;  // [block][rows]: what unsigned bytes of the weight add, to be added
  const uint8_t* w[2];
  const uint16_t* scale[2];  // [groups][kTile]
  int64_t rows, blocks, groups, group_blocks;
  int64_t ahead;  // bytes from a tile to the one that is fetched into the second-level cache meanwhile
  float* acc;
  int64_t acc_step;  // from a row of acc to its next
};

struct FewSet {
  void (*open)(int64_t rows);  // before a thread multiplies: its tiles' shapes
  void (*multiply[2])(const FewArgs&);  // 8 bits, 4 bits
  void (*close)();
};

}  // namespace rm::cpu::quant
