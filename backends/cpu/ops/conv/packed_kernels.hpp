// What an instruction set brings for packed convolutions beside gemm's tiles. Plain structs: ISA
// sources include this.
#pragma once

#include <cstdint>

namespace rm::cpu::conv {

/// y = act(acc + bias + residual), for the rows of a tile and one panel of channels.
struct PanelStore {
  const float* acc;  // [rows][nr]
  int64_t rows, channels;
  const float* bias;      // of the panel's first channel; null: none
  const float* residual;  // null: none
  int64_t residual_stride;
  float* y;
  int64_t y_stride;
};

/// Rows of x by some panels, and the end of them: y = act(x * w + bias + residual).
struct Strip {
  const float* x;
  int64_t x_stride;
  const float* panels;  // [panel][steps][nr]
  int64_t steps, num_panels, channels;  // channels: of all these panels
  const float* bias;                    // as in PanelStore
  const float* residual;
  int64_t residual_stride;
  float* y;
  int64_t y_stride;
  bool plain;   // the activation is v < floor ? 0 : v
  float floor;  // 0: relu; -inf: none
  void (*store)(const PanelStore&);  // of the activation
  // Prefetched on the side, `ahead_step` bytes a step.
  const char* ahead;
  int64_t ahead_step;
};

constexpr int kMostStripRows = 14;

struct PackedSet {
  void (*store[8])(const PanelStore&);  // by conv::Activation
  void (*strip[kMostStripRows])(const Strip&);  // by rows less one
};

}  // namespace rm::cpu::conv
