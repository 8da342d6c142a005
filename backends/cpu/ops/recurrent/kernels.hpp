// What an instruction set brings for a step of a recurrent layer: a panel of hidden units for some
// rows of the batch. Weights lie in panels: of each `width` units, for each element of the state,
// the weights of the gates of these units side by side, in their own type.
#pragma once

#include "common/types.hpp"

namespace rm::cpu::recurrent {

/// `project` is the product with the projection of an LSTM's output: one "gate", no activation.
enum class Cell : uint8_t { lstm, gru, tanh, relu, project };

static constexpr int64_t gates_of(Cell cell) { return cell == Cell::lstm ? 4 : cell == Cell::gru ? 3 : 1; }

struct PackArgs {
  const void* src;  // [gates * units, depth]
  int64_t row, col;
  int64_t gates, units, depth;
  void* dst;
  int64_t begin, end;  // panels
};

struct StepArgs {
  const void* panel;       // of the units
  int64_t first, units;    // the first unit of the panel, and how many there are (<= width)
  int64_t hidden, depth;   // units of the layer; elements of the state
  const float* h;          // [rows, ld_h]: the state before the step
  int64_t ld_h;
  int64_t rows;
  // At the panel's first unit, of the first row:
  const void* x;           // gates `hidden` apart; null for project
  int64_t x_row;
  const float* bias;       // gates ld_c apart; null for project
  float* c;                // state of an lstm, rows ld_c apart
  int64_t ld_c;
  float* made;             // the new state, rows ld_made apart
  int64_t ld_made;
  void* y;                 // null: not stored
  int64_t y_row;
};

struct KernelSet {
  int64_t width, rows;  // units of a panel, rows of a tile
  void (*pack[3])(const PackArgs&);      // by type: f32, bf16, f16
  void (*step[3][5])(const StepArgs&);   // by type and cell
};

}  // namespace rm::cpu::recurrent
