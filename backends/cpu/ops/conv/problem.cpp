// Decodes conv's operands and attributes.
#include "ops/conv/problem.hpp"

#include <algorithm>
#include <stdexcept>

namespace rm::cpu::conv {
namespace {

void require(bool ok, const char* expected) {
  if (!ok) throw std::invalid_argument(std::string("[conv] expected ") + expected);
}

Triple spread(const std::vector<int64_t>& values, size_t axes, int64_t front, size_t from = 0) {
  Triple out{front, front, front};
  for (size_t a = 0; a < axes; ++a) out[3 - axes + a] = values.at(from + a);
  return out;
}

Triple attribute(const Problem& p, const char* name, size_t axes, int64_t otherwise) {
  const std::vector<int64_t> given = p.attr_ints(name);
  if (given.empty()) return {otherwise, otherwise, otherwise};
  require(given.size() == axes, "one value for each spatial axis");
  return spread(given, axes, otherwise);
}

std::array<int64_t, 5> steps(const View& v) {
  std::array<int64_t, 5> out{v.stride[0], v.stride[1], 0, 0, 0};
  const size_t axes = v.shape.size() - 2;
  for (size_t a = 0; a < axes; ++a) out[5 - axes + a] = v.stride[2 + a];
  return out;
}

bool lies_last(const View& v) {
  int64_t expected = 1;
  const auto holds = [&](size_t axis) {
    const bool ok = v.shape[axis] == 1 || v.stride[axis] == expected;
    expected *= v.shape[axis];
    return ok;
  };
  bool ok = holds(1);
  for (size_t axis = v.shape.size(); axis-- > 2;) ok = holds(axis) && ok;
  return holds(0) && ok;
}

Activation activation_of(std::string_view name) {
  static constexpr const char* const names[] = {"none", "relu", "gelu",    "gelu_tanh",
                                                "silu", "tanh", "sigmoid", "hardswish"};
  for (int i = 0; i < 8; ++i) {
    if (name == names[i]) return static_cast<Activation>(i);
  }
  throw std::invalid_argument("[conv] expected an activation of docs/operators.md, got " +
                              std::string(name));
}

}  // namespace

double ConvProblem::flops() const {
  const Triple& places = transposed ? x : y;
  const double products = static_cast<double>(places[0] * places[1] * places[2]) *
                          static_cast<double>(k[0] * k[1] * k[2]) * static_cast<double>(batch);
  return 2 * products * static_cast<double>(from_each()) * static_cast<double>(to);
}

double ConvProblem::weights() const {
  return static_cast<double>(k[0] * k[1] * k[2]) * static_cast<double>(from_each()) *
         static_cast<double>(to);
}

bool ConvProblem::empty() const {
  return batch == 0 || from == 0 || to == 0 || std::count(x.begin(), x.end(), 0) > 0 ||
         std::count(y.begin(), y.end(), 0) > 0;
}

ConvProblem decode(const rm_problem& raw) {
  const Problem p(raw);
  const View x = p.input(kX), w = p.input(kW), y = p.output(0);
  require(x.rank() >= 3 && x.rank() <= 5 && w.rank() == x.rank() && y.rank() == x.rank(),
          "x, w and y of one rank, 3 to 5");
  const size_t axes = x.shape.size() - 2;
  ConvProblem c;
  c.dtype = x.dtype;
  require(is_float(x.dtype) && w.dtype == x.dtype && y.dtype == x.dtype, "one floating type");
  c.axes = static_cast<int>(axes);
  c.transposed = p.attr_int("transposed", 0) != 0;
  c.groups = p.attr_int("groups", 1);
  c.constant_w = (raw.constant_inputs >> kW & 1) != 0;
  c.batch = x.shape[0];
  c.from = x.shape[1];
  c.to = y.shape[1];
  c.x = spread(x.shape, axes, 1, 2);
  c.y = spread(y.shape, axes, 1, 2);
  c.k = spread(w.shape, axes, 1, 2);
  c.stride = attribute(p, "stride", axes, 1);
  c.dilation = attribute(p, "dilation", axes, 1);
  c.output_padding = attribute(p, "output_padding", axes, 0);
  const std::vector<int64_t> padding = p.attr_ints("padding");
  require(padding.empty() || padding.size() == 2 * axes, "padding for both ends of each axis");
  if (!padding.empty()) {
    c.begin = spread(padding, axes, 0);
    c.end = spread(padding, axes, 0, axes);
  }
  require(c.groups > 0 && c.from % c.groups == 0 && c.to % c.groups == 0, "groups of channels");
  const int64_t w0 = c.transposed ? c.from : c.to, w1 = c.transposed ? c.to_each() : c.from_each();
  require(w.shape[0] == w0 && w.shape[1] == w1 && y.shape[0] == c.batch, "sizes that agree");
  const auto keep = [&](Operand o, const View& v) {
    c.given[o] = true;
    c.step[o] = steps(v);
    c.channels_last[o] = lies_last(v);
  };
  keep(kX, x), keep(kW, w), keep(kY, y);
  if (p.has_input(kBias)) {
    const View bias = p.input(kBias);
    require(bias.rank() == 1 && bias.shape[0] == c.to && bias.dtype == c.dtype, "a bias of y");
    c.given[kBias] = true;
    c.step[kBias][0] = bias.stride[0];
  }
  if (p.has_input(kResidual)) {
    const View residual = p.input(kResidual);
    require(residual.shape == y.shape && residual.dtype == c.dtype, "a residual like y");
    keep(kResidual, residual);
  }
  c.activation = activation_of(p.attr_string("activation", "none"));
  return c;
}

}  // namespace rm::cpu::conv
