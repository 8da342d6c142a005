// What quant_linear (linear.cpp) and its per-ISA kernels (isa_quant.cpp) agree on. Plain data and
// function pointers only. The layout of weights is docs/operators.md's.
#pragma once

#include "ops/gemm/tile.hpp"

namespace rm::cpu::quant {

constexpr int kStreams = 4;  // rows read at once, from places far apart (see gemm's direct kernels)
constexpr int kBlock = 32;   // elements that kernels work on at a time
constexpr int kMostBlocks = 4;  // blocks of the largest group
constexpr int kSpare = 16;      // floats behind scales, sums and factors: vectors may reach there

/// One row of x as integers of 16 bits, |value| <= 32639, with a scale for each group.
/// 8-bit weights: int16 values in order. 4-bit weights: of each block the 32 high bytes, then the
/// 32 low ones (value = 256 * high + low).
struct SpreadArgs {
  const void* src;
  int64_t col_stride, k, blocks, bits;
  int64_t group_blocks, groups;
  char* values;   // 64 bytes a block
  float* scales;  // a group; kSpare zeros follow
  float* sums;    // a group: the sum of its elements; kSpare zeros follow
};

/// out[s] = x . (row s of the weight).
struct DotArgs {
  const char* values;
  const float *scales, *sums;
  const uint8_t* w[kStreams];
  const uint16_t* scale[kStreams];
  const uint16_t* zero[kStreams];  // null: zero_point
  float zero_point;
  int64_t blocks, groups, group_blocks;
  float* factors;  // scratch, a group: kStreams * (blocks + kSpare)
  float* out[kStreams];
};

/// A row of the weight as f32.
struct WidenArgs {
  const uint8_t* w;
  const uint16_t *scale, *zero;
  float zero_point;
  int64_t k, group;
  float* dst;  // room for blocks * kBlock
};

/// One row of f32, bf16 or f16 to integers.
struct QuantizeArgs {
  const void* src;
  int64_t col_stride, k, bits, group, row_bytes;
  bool symmetric;
  uint8_t* q;
  uint16_t *scale, *zero;
};

struct QuantSet {
  void (*spread[gemm::kTileTypes])(const SpreadArgs&);
  void (*dot[2])(const DotArgs&);  // 8 bits, 4 bits
  void (*widen[2])(const WidenArgs&);
  void (*quantize[gemm::kTileTypes])(const QuantizeArgs&);
};

}  // namespace rm::cpu::quant
