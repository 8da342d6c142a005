// What quant_linear on matrix tiles (amx.cpp) and its kernels (isa_amx.cpp) agree on. Plain data and
// function pointers only.
//
// A chunk is kAmxColumns rows of the weight as bf16, [block of 32 elements of k][row][element]: the
// tiles' lines of 64 bytes lie one behind the other, so no two of a tile share a set of the cache.
#pragma once

#include "ops/gemm/amx_kernels.hpp"
#include "ops/quant/tile.hpp"

namespace rm::cpu::quant {

constexpr int64_t kChunkBlockBytes = gemm::kAmxColumns * kBlock * 2;

/// A tile of eight rows to eight rows of a chunk.
struct AmxTile {
  const uint8_t* w;
  const uint16_t* scale;  // [groups][kTile]
  int64_t blocks, groups, group_blocks;
  char* dst;  // of the first row
};

/// One row of f32 to a row of a chunk.
struct AmxRow {
  const float* row;
  int64_t blocks;
  char* dst;
};

struct AmxFill {
  void (*tile[2])(const AmxTile&);  // 8 bits, 4 bits
  void (*row)(const AmxRow&);
};

}  // namespace rm::cpu::quant
