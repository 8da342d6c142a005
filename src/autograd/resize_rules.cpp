// Interpolation is a matrix product along each spatial axis, so its gradient is one with the matrix
// transposed. The matrices are made of positions alone: they are constants of the program.
#include <cmath>

#include "autograd/rules.hpp"

namespace rm::autograd {
namespace {

using ir::DType;
using ir::Dim;
using ir::Dims;

// [count, size]: what each element of the result takes from each of the operand (as ops/vision
// computes it: nearest positions are rounded in f32, as torch's are).
ValueId matrix(Adjoint& a, int64_t size, int64_t count, double ratio) {
  Builder& b = a.b;
  const auto last = static_cast<double>(size - 1);
  auto column = [&](ValueId v) { return b.reshape(v, {Dim(count), Dim(1)}); };
  auto takes = [&](ValueId at) {
    return b.cast(b.op("eq", {column(b.cast(at, DType::kI64)), b.iota(size)}), b.dtype(a.dy()));
  };
  if (a.node.s("mode") == "nearest") {
    ValueId at = b.cast(b.iota(count), DType::kF32);
    at = b.op("floor", {b.scaled(at, static_cast<double>(static_cast<float>(ratio)))});
    return takes(b.op("minimum", {at, b.number(at, last)}));
  }
  ValueId at = b.cast(b.iota(count), DType::kF64);
  if (a.node.i_or("align_corners", 0) != 0) {
    at = b.scaled(at, ratio);
  } else {
    at = b.plus(b.scaled(b.plus(at, 0.5), ratio), -0.5);
    at = b.op("maximum", {at, b.number(at, 0)});
  }
  ValueId first = b.op("minimum", {b.op("floor", {at}), b.number(at, last)});
  ValueId second = b.op("minimum", {b.plus(first, 1), b.number(at, last)});
  ValueId part = b.op("minimum", {b.sub(at, first), b.number(at, 1)});
  part = b.cast(column(part), b.dtype(a.dy()));
  ValueId rest = b.sub(b.number(part, 1), part);
  return b.add(b.mul(takes(first), rest), b.mul(takes(second), part));
}

// Every element repeated a whole number of times along each axis: the repeats are summed.
bool repeats(Adjoint& a, const std::vector<double>& ratio) {
  if (a.node.s("mode") != "nearest") return false;
  Builder& b = a.b;
  Dims split{b.dims(a.x())[0], b.dims(a.x())[1]};
  Ints axes;
  for (size_t i = 0; i < ratio.size(); ++i) {
    const int64_t size = b.size(a.x(), i + 2), count = b.size(a.dy(), i + 2);
    const int64_t times = size == 0 ? 0 : count / size;
    if (times < 1 || times * size != count || (times & (times - 1)) != 0 ||
        ratio[i] * static_cast<double>(times) != 1.0) {
      return false;  // not a power of two: the rounded position may lie one element before
    }
    split.emplace_back(size);
    split.emplace_back(times);
    axes.push_back(static_cast<int64_t>(split.size()) - 1);
  }
  a.din[0] = b.reshape(b.reduce("sum", b.reshape(a.dy(), std::move(split)), std::move(axes), false),
                       b.dims(a.x()));
  return true;
}

void resize(Adjoint& a) {
  Builder& b = a.b;
  const std::vector<double>& ratio = a.node.floats("ratio");
  if (repeats(a, ratio)) return;
  ValueId dx = a.dy();
  for (size_t i = 0; i < ratio.size(); ++i) {
    const int64_t size = b.size(a.x(), i + 2), count = b.size(dx, i + 2);
    ValueId m = matrix(a, size, count, ratio[i]);
    Dims made = b.dims(dx);
    made[i + 2] = Dim(size);
    int64_t before = 1, behind = 1;
    for (size_t k = 0; k < i + 2; ++k) before *= made[k].value();
    for (size_t k = i + 3; k < made.size(); ++k) behind *= made[k].value();
    if (behind == 1) {
      dx = b.matmul(b.reshape(dx, {Dim(before), Dim(count)}), m);
    } else {
      dx = b.matmul(b.transpose(m), b.reshape(dx, {Dim(before), Dim(count), Dim(behind)}));
    }
    dx = b.reshape(dx, std::move(made));
  }
  a.din[0] = dx;
}

}  // namespace

std::vector<NamedRule> resize_rules() { return {{"resize", resize}}; }

}  // namespace rm::autograd
