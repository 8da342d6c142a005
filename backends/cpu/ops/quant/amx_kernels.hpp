// What quant_linear on matrix tiles (amx.cpp) and its kernels (isa_amx.cpp) agree on. Plain data and
// function pointers only.
//
// A chunk is kAmxColumns rows of the weight as bf16, as gemm's AmxCopy makes it: [block of 32 elements
// of k][half of the rows][pair of k][row].
#pragma once

#include "ops/gemm/amx_kernels.hpp"
#include "ops/quant/tile.hpp"

namespace rm::cpu::quant {

constexpr int64_t kChunkBlockBytes = gemm::kAmxColumns * kBlock * 2;

/// Two tiles of eight rows to half of a chunk's rows.
struct AmxTiles {
  const uint8_t* w[2];
  const uint16_t* scale[2];  // [groups][kTile]
  int64_t blocks, groups, group_blocks;
  char* dst;  // of the first of these rows
};

/// One row of f32 to bf16: as it lies, or to a row of a chunk.
struct AmxRow {
  const float* row;
  int64_t blocks;
  char* dst;
};

struct AmxFill {
  void (*tiles[2])(const AmxTiles&);  // 8 bits, 4 bits
  void (*row)(const AmxRow&);
  void (*column)(const AmxRow&);
};

}  // namespace rm::cpu::quant
