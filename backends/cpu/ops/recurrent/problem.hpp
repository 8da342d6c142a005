// A decoded problem of recurrent: sizes and strides by role.
#pragma once

#include "common/problem.hpp"
#include "ops/recurrent/kernels.hpp"
#include "rm/kernels.h"

namespace rm::cpu::recurrent {

enum Input : size_t { kX, kW, kH, kC, kBias, kProj, kInputs };

/// Strides in elements; `t` along the steps, `b` along the batch, `n` along the last axis.
struct Strides {
  int64_t t = 0, b = 0, n = 0;
};

struct RecurrentProblem {
  Cell cell = Cell::lstm;
  int64_t gates = 4;
  int64_t steps = 0, batch = 0, hidden = 0, out = 0;  // out: elements of the state h
  bool reverse = false;
  DType type = DType::f32;
  Strides in[kInputs];   // of weights: b along the rows
  Strides y, h, c;       // results
  bool has_bias = false, has_proj = false;
  bool constant_w = false, constant_proj = false;

  bool is_lstm() const { return cell == Cell::lstm; }
  bool empty() const { return batch == 0; }
  double step_flops() const {
    return 2.0 * static_cast<double>(batch * out) *
           static_cast<double>(gates * hidden + (has_proj ? hidden : 0));
  }
};

/// Throws std::invalid_argument for operands outside the schema.
RecurrentProblem decode(const rm_problem& p);

/// f(T{}) for the storage type of a problem.
template <class F>
void with_type(DType type, F&& f) {
  if (type == DType::f32) return f(float{});
  if (type == DType::bf16) return f(bf16{});
  f(f16{});
}

}  // namespace rm::cpu::recurrent
