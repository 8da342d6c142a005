// What quant_linear's path for activations of 8 bits (tiles.cpp) and its kernels (isa_tile.cpp)
// agree on. Plain data and function pointers only.
#pragma once

#include "ops/quant/kernels.hpp"

namespace rm::cpu::quant {

constexpr int kTile = 8;  // rows that lie as one (docs/operators.md)

/// One row of x as integers of 8 bits, a scale for each block of 32.
struct RoundArgs {
  const void* src;
  int64_t col_stride, k, blocks;  // blocks behind k are zero
  int8_t* values;
  float* scales;  // a block
  int32_t* sums;  // a block: of its integers
  int64_t values_step = kBlock, scales_step = 1;  // from a block to its next
};

/// out[t][r] = x . (row r of tile t), or out[0][0] = x . (a row that lies alone).
struct TileArgs {
  const int8_t* x;
  const float* scales;
  const int32_t* sums;
  const uint8_t* w[2];
  const uint16_t* scale[2];  // [groups][kTile], a row that lies alone: [groups]
  int64_t blocks, groups, group_blocks;
  float* out[2];
};

/// A tile as eight columns of a panel of f32: element (k, row) at dst[k * stride + row].
struct PanelArgs {
  const uint8_t* w;
  const uint16_t* scale;
  int64_t k, group;
  float* dst;
  int64_t stride;
};

/// Functions of 8 bits come before those of 4.
struct TileSet {
  void (*round[gemm::kTileTypes])(const RoundArgs&);
  void (*pair[2])(const TileArgs&);  // two tiles from places far apart
  void (*one[2])(const TileArgs&);
  void (*row[2])(const TileArgs&);
  void (*panel[2])(const PanelArgs&);
};

}  // namespace rm::cpu::quant
