// What an instruction set brings for direct convolutions. Plain structs: ISA sources include this.
#pragma once

#include "common/types.hpp"

namespace rm::cpu::conv {

/// A tile: kTilePixels places of y by one panel of output channels. Channels of x lie in a row.
inline constexpr int kTilePixels = 6;

struct Tile {
  const void* const* taps;  // [num_taps][pixels]: the first channel of x there, or of a row of zeros
  const float* weights;     // [num_taps][channels][lanes of the panel]
  int64_t num_taps, channels;
  float* sums;  // [pixels][lanes of the panel]
};

struct Finish {
  const float* sums;
  const void* bias;      // of the first channel; null: none
  const void* residual;  // null: none
  void* y;
  int64_t channels;
  int activation;  // conv::Activation
};

/// One type of elements.
struct DirectKernels {
  /// By vectors of the panel less one; of kTilePixels places, and of one.
  void (*tiles[4])(const Tile&);
  void (*rows[4])(const Tile&);
  /// sums[c] = sum over taps of x[tap][c] * weights[tap][c]; `channels` of them, `stride` between
  /// the weights of two taps.
  void (*depthwise)(const void* const* taps, const float* weights, int64_t stride,
                    int64_t num_taps, int64_t channels, float* sums);
  void (*finish)(const Finish&);
};

struct DirectSet {
  int width;    // lanes of a vector
  int vectors;  // of a panel, at most
  DirectKernels f32, bf16, f16;
};

}  // namespace rm::cpu::conv
