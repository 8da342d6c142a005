// Decodes and checks gemm problems (docs/operators.md, row `gemm`).
#include "ops/gemm/problem.hpp"

#include <stdexcept>
#include <string>

namespace rm::cpu::gemm {
namespace {

[[noreturn]] void mismatch(const std::string& expected, const std::string& got) {
  throw std::invalid_argument("[gemm] expected " + expected + ", got " + got);
}

std::string text(const View& v) {
  std::string out = dtype_name(v.dtype);
  char separator = '[';
  for (int64_t size : v.shape) {
    out += separator;
    out += std::to_string(size);
    separator = ',';
  }
  return out += ']';
}

Activation parse_activation(std::string_view name) {
  constexpr std::string_view kNames[] = {"none", "relu", "gelu",   "gelu_tanh",
                                         "silu", "tanh", "sigmoid"};
  for (int i = 0; i < kActivations; ++i) {
    if (name == kNames[i]) return static_cast<Activation>(i);
  }
  mismatch("an activation of docs/operators.md", std::string(name));
}

struct Axis {
  int64_t size;
  std::array<int64_t, kOperands> stride;
};

/// Leading axes with their strides; b gets 0 where it has no axis or is broadcast.
std::vector<Axis> leading_axes(const GemmProblem& g, const View& a, const View& b,
                               const View& residual, const View& c) {
  const int lead = a.rank() - 2;
  const bool flat_b = b.rank() == 2;
  if (!flat_b && b.rank() != a.rank()) mismatch("b of rank 2 or of a's rank", text(b));
  std::vector<Axis> axes;
  for (int i = 0; i < lead; ++i) {
    const int64_t size = a.shape[i];
    if (c.shape[i] != size || (!flat_b && b.shape[i] != size)) {
      mismatch("equal leading axes", text(a) + ", " + text(b) + " and " + text(c));
    }
    if (size == 1) continue;
    axes.push_back({size,
                    {a.stride[i], flat_b ? 0 : b.stride[i], 0,
                     g.has(kResidual) ? residual.stride[i] : 0, c.stride[i]}});
  }
  return axes;
}

/// The innermost leading axis joins the rows while every operand steps through it evenly.
void fold(GemmProblem& g, std::vector<Axis>& axes) {
  while (!axes.empty()) {
    const Axis& last = axes.back();
    if (last.stride[kB] != 0) return;
    if (g.m != 1) {
      for (Operand o : {kA, kResidual, kC}) {
        if (g.has(o) && last.stride[o] != g.row[o] * g.m) return;
      }
    } else {
      for (Operand o : {kA, kResidual, kC}) g.row[o] = last.stride[o];
    }
    g.m *= last.size;
    axes.pop_back();
  }
}

}  // namespace

Pointers::Pointers(const GemmProblem& g, const rm_launch& l) {
  for (Operand o : {kA, kB, kBias, kResidual}) {
    if (g.has(o)) ptr[o] = static_cast<const char*>(l.inputs[o]);
  }
  ptr[kC] = static_cast<const char*>(l.outputs[0]);
}

int64_t GemmProblem::offset(Operand o, int64_t index) const {
  int64_t at = 0;
  for (size_t i = outer.size(); i-- > 0; index /= outer[i]) {
    at += index % outer[i] * outer_stride[o][i];
  }
  return at;
}

GemmProblem decode(const rm_problem& problem) {
  const Problem p(problem);
  const View a = p.input(kA), b = p.input(kB), c = p.output(0);
  const View bias = p.has_input(kBias) ? p.input(kBias) : View{};
  const View residual = p.has_input(kResidual) ? p.input(kResidual) : View{};
  if (a.rank() < 2) mismatch("a of rank 2 or more", text(a));
  if (b.rank() < 2) mismatch("b of rank 2 or more", text(b));
  if (c.rank() != a.rank()) mismatch("c of a's rank", text(c));

  GemmProblem g;
  const bool trans_b = p.attr_int("trans_b", 0) != 0;
  g.m = a.dim(-2), g.k = a.dim(-1), g.n = c.dim(-1);
  if (b.dim(trans_b ? -1 : -2) != g.k || b.dim(trans_b ? -2 : -1) != g.n || c.dim(-2) != g.m) {
    mismatch("a [*,M,K], b [*,K,N] (or [*,N,K] with trans_b), c [*,M,N]",
             text(a) + ", " + text(b) + " and " + text(c));
  }
  g.dtype = {a.dtype, b.dtype, bias.dtype, residual.dtype, c.dtype};
  g.row = {a.step(-2), b.step(trans_b ? -1 : -2), 0, 0, c.step(-2)};
  g.col = {a.step(-1), b.step(trans_b ? -2 : -1), 0, 0, c.step(-1)};
  if (g.has(kBias)) {
    if (bias.rank() != 1 || bias.dim(0) != g.n) mismatch("bias [N]", text(bias));
    g.col[kBias] = bias.step(0);
  }
  if (g.has(kResidual)) {
    if (residual.shape != c.shape) mismatch("residual of c's shape", text(residual));
    g.row[kResidual] = residual.step(-2), g.col[kResidual] = residual.step(-1);
  }
  g.activation = parse_activation(p.attr_string("activation", "none"));
  g.alpha = p.attr_float("alpha", 1.0);
  g.constant_operand_b = (problem.constant_inputs >> kB & 1) != 0;
  g.constant_b = g.constant_operand_b && p.attr_int("pack_weights", 1) != 0;

  std::vector<Axis> axes = leading_axes(g, a, b, residual, c);
  fold(g, axes);
  for (const Axis& axis : axes) {
    g.outer.push_back(axis.size);
    g.batch *= axis.size;
    g.shared_b = g.shared_b && axis.stride[kB] == 0;
    for (int o = 0; o < kOperands; ++o) g.outer_stride[o].push_back(axis.stride[o]);
  }
  return g;
}

}  // namespace rm::cpu::gemm
