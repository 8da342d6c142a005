#include "ops/recurrent/problem.hpp"

#include <stdexcept>

namespace rm::cpu::recurrent {
namespace {

Cell cell_of(const Problem& p) {
  const std::string_view cell = p.attr_string("cell", "");
  if (cell == "lstm") return Cell::lstm;
  if (cell == "gru") return Cell::gru;
  if (cell == "tanh") return Cell::tanh;
  if (cell == "relu") return Cell::relu;
  throw std::invalid_argument("[recurrent] expected cell lstm, gru, tanh or relu, got another");
}

void check(const View& v, DType type, std::initializer_list<int64_t> shape) {
  if (v.dtype != type || v.shape != std::vector<int64_t>(shape)) {
    throw std::invalid_argument("[recurrent] expected operands that fit together, got others");
  }
}

Strides matrix(const View& v) { return {0, v.stride[0], v.stride[1]}; }

}  // namespace

RecurrentProblem decode(const rm_problem& raw) {
  const Problem p(raw);
  const View x = p.input(kX), w = p.input(kW), y = p.output(0), h = p.output(1);
  if (!is_float32_class(x.dtype) || x.rank() != 3 || w.rank() != 2) {
    throw std::invalid_argument("[recurrent] expected sequences of floats, got others");
  }
  RecurrentProblem r;
  r.cell = cell_of(p);
  r.gates = gates_of(r.cell);
  r.type = x.dtype;
  r.reverse = p.attr_int("reverse", 0) != 0;
  const size_t time = p.attr_int("batch_first", 0) != 0 ? 1 : 0;
  r.steps = x.shape[time];
  r.batch = x.shape[1 - time];
  r.out = w.shape[1];
  r.hidden = w.shape[0] / r.gates;
  const int64_t rows = r.gates * r.hidden;
  check(x, r.type, {x.shape[0], x.shape[1], rows});
  check(w, r.type, {rows, r.out});
  check(p.input(kH), r.type, {r.batch, r.out});
  check(y, r.type, {x.shape[0], x.shape[1], r.out});
  check(h, r.type, {r.batch, r.out});
  r.in[kX] = {x.stride[time], x.stride[1 - time], x.stride[2]};
  r.y = {y.stride[time], y.stride[1 - time], y.stride[2]};
  r.in[kW] = matrix(w);
  r.in[kH] = matrix(p.input(kH));
  r.h = matrix(h);
  if (r.is_lstm()) {
    check(p.input(kC), r.type, {r.batch, r.hidden});
    check(p.output(2), r.type, {r.batch, r.hidden});
    r.in[kC] = matrix(p.input(kC));
    r.c = matrix(p.output(2));
  }
  r.has_bias = p.has_input(kBias);
  if (r.has_bias) {
    check(p.input(kBias), r.type, {rows});
    r.in[kBias] = {0, 0, p.input(kBias).stride[0]};
  }
  r.has_proj = p.has_input(kProj);
  if (r.has_proj) {
    check(p.input(kProj), r.type, {r.out, r.hidden});
    r.in[kProj] = matrix(p.input(kProj));
  }
  if (!r.has_proj && r.out != r.hidden) {
    throw std::invalid_argument("[recurrent] expected a projection, got none");
  }
  r.constant_w = (raw.constant_inputs >> kW & 1) != 0;
  r.constant_proj = r.has_proj && (raw.constant_inputs >> kProj & 1) != 0;
  return r;
}

}  // namespace rm::cpu::recurrent
