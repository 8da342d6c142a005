// Unary, binary, where and cast. Where a function has no derivative the rule gives what torch gives.
#include <cmath>
#include <numbers>

#include "autograd/rules.hpp"

namespace rm::autograd {
namespace {

// ---- unary: the derivative times dy ------------------------------------------------------------

void neg(Adjoint& a) { a.give(0, a.b.neg(a.dy())); }
void abs(Adjoint& a) { a.give(0, a.b.mul(a.dy(), a.b.op("sign", {a.x()}))); }
void exp(Adjoint& a) { a.give(0, a.b.mul(a.dy(), a.y())); }
void log(Adjoint& a) { a.give(0, a.b.div(a.dy(), a.x())); }
void sqrt(Adjoint& a) { a.give(0, a.b.div(a.dy(), a.b.scaled(a.y(), 2))); }
void rsqrt(Adjoint& a) {
  ValueId cube = a.b.mul(a.b.mul(a.y(), a.y()), a.y());
  a.give(0, a.b.mul(a.dy(), a.b.scaled(cube, -0.5)));
}
void sin(Adjoint& a) { a.give(0, a.b.mul(a.dy(), a.b.op("cos", {a.x()}))); }
void cos(Adjoint& a) { a.give(0, a.b.neg(a.b.mul(a.dy(), a.b.op("sin", {a.x()})))); }
void tanh(Adjoint& a) {
  a.give(0, a.b.mul(a.dy(), a.b.sub(a.b.number(a.y(), 1), a.b.mul(a.y(), a.y()))));
}
void erf(Adjoint& a) {
  ValueId bell = a.b.op("exp", {a.b.neg(a.b.mul(a.x(), a.x()))});
  a.give(0, a.b.mul(a.dy(), a.b.scaled(bell, 2 * std::numbers::inv_sqrtpi)));
}
void sigmoid(Adjoint& a) {
  a.give(0, a.b.mul(a.dy(), a.b.mul(a.y(), a.b.sub(a.b.number(a.y(), 1), a.y()))));
}
// From the result, so that the operand need not be kept. Behind a NaN the gradient passes.
void relu(Adjoint& a) {
  const ValueId zero = a.b.number(a.y(), 0);
  a.give(0, a.b.where(a.b.op("le", {a.y(), zero}), zero, a.dy()));
}
// x Phi(x): Phi(x) + x phi(x).
void gelu(Adjoint& a) {
  Builder& b = a.b;
  ValueId x = a.x();
  ValueId cdf = b.scaled(b.plus(b.op("erf", {b.scaled(x, 1 / std::numbers::sqrt2)}), 1), 0.5);
  ValueId pdf = b.scaled(b.op("exp", {b.scaled(b.mul(x, x), -0.5)}),
                      std::numbers::inv_sqrtpi / std::numbers::sqrt2);
  a.give(0, b.mul(a.dy(), b.add(cdf, b.mul(x, pdf))));
}
// x (1 + tanh u) / 2 with u = c (x + 0.044715 x^3).
void gelu_tanh(Adjoint& a) {
  Builder& b = a.b;
  ValueId x = a.x(), square = b.mul(x, x);
  const double c = std::numbers::sqrt2 * std::numbers::inv_sqrtpi;
  ValueId t = b.op("tanh", {b.scaled(b.mul(x, b.plus(b.scaled(square, 0.044715), 1)), c)});
  ValueId slope = b.scaled(b.plus(b.scaled(square, 3 * 0.044715), 1), c);
  ValueId second = b.mul(b.mul(x, b.sub(b.number(t, 1), b.mul(t, t))), slope);
  a.give(0, b.mul(a.dy(), b.scaled(b.add(b.plus(t, 1), second), 0.5)));
}
// x s: s (1 + x (1 - s)).
void silu(Adjoint& a) {
  Builder& b = a.b;
  ValueId s = b.op("sigmoid", {a.x()});
  ValueId inner = b.plus(b.mul(a.x(), b.sub(b.number(s, 1), s)), 1);
  a.give(0, b.mul(a.dy(), b.mul(s, inner)));
}
void softplus(Adjoint& a) { a.give(0, a.b.mul(a.dy(), a.b.op("sigmoid", {a.x()}))); }
void reciprocal(Adjoint& a) { a.give(0, a.b.neg(a.b.mul(a.dy(), a.b.mul(a.y(), a.y())))); }
void log1p(Adjoint& a) { a.give(0, a.b.div(a.dy(), a.b.plus(a.x(), 1))); }
void expm1(Adjoint& a) { a.give(0, a.b.mul(a.dy(), a.b.plus(a.y(), 1))); }

// ---- binary ------------------------------------------------------------------------------------

void add(Adjoint& a) {
  if (a.wants(0)) a.give(0, a.dy());
  if (a.wants(1)) a.give(1, a.dy());
}
void sub(Adjoint& a) {
  if (a.wants(0)) a.give(0, a.dy());
  if (a.wants(1)) a.give(1, a.b.neg(a.dy()));
}
void mul(Adjoint& a) {
  if (a.wants(0)) a.give(0, a.b.mul(a.dy(), a.x(1)));
  if (a.wants(1)) a.give(1, a.b.mul(a.dy(), a.x(0)));
}
void div(Adjoint& a) {
  if (a.wants(0)) a.give(0, a.b.div(a.dy(), a.x(1)));
  if (a.wants(1)) a.give(1, a.b.neg(a.b.div(a.b.mul(a.dy(), a.y()), a.x(1))));
}
void pow(Adjoint& a) {
  Builder& b = a.b;
  ValueId base = a.x(0), exponent = a.x(1), zero = b.number(base, 0);
  if (a.wants(0)) {  // x^0 has slope 0 also where x is 0
    ValueId slope = b.mul(exponent, b.op("pow", {base, b.plus(exponent, -1)}));
    ValueId flat = b.op("eq", {exponent, zero});
    a.give(0, b.where(flat, zero, b.mul(a.dy(), slope)));
  }
  if (a.wants(1)) {  // 0^y is flat for y >= 0
    ValueId flat = b.op("and", {b.op("eq", {base, zero}), b.op("ge", {exponent, zero})});
    a.give(1, b.where(flat, zero, b.mul(a.dy(), b.mul(a.y(), b.op("log", {base})))));
  }
}
// The greater takes the gradient, equals share it. A literal bound is a clamp: its ties pass whole.
void extreme(Adjoint& a, const char* loses, const char* reaches) {
  Builder& b = a.b;
  for (size_t i : {size_t{0}, size_t{1}}) {
    if (!a.wants(i)) continue;
    ValueId mine = a.x(i), other = a.x(1 - i);
    if (b.graph().is_constant(other)) {
      a.give(i, b.keep_where(b.op(reaches, {mine, other}), a.dy()));
      continue;
    }
    ValueId shared = b.where(b.op("eq", {mine, other}), b.scaled(a.dy(), 0.5), a.dy());
    a.give(i, b.where(b.op(loses, {mine, other}), b.number(shared, 0), shared));
  }
}
void maximum(Adjoint& a) { extreme(a, "lt", "ge"); }
void minimum(Adjoint& a) { extreme(a, "gt", "le"); }
void remainder(Adjoint& a) {
  if (a.wants(0)) a.give(0, a.dy());
  if (a.wants(1)) {
    a.give(1, a.b.neg(a.b.mul(a.dy(), a.b.op("floor_div", {a.x(0), a.x(1)}))));
  }
}
void where(Adjoint& a) {
  ValueId zero = a.b.number(a.dy(), 0);
  if (a.wants(1)) a.give(1, a.b.where(a.x(0), a.dy(), zero));
  if (a.wants(2)) a.give(2, a.b.where(a.x(0), zero, a.dy()));
}
void cast(Adjoint& a) { a.give(0, a.b.cast(a.dy(), a.b.dtype(a.x()))); }

}  // namespace

std::vector<NamedRule> elementwise_rules() {
  std::vector<NamedRule> rules = {
      {"neg", neg}, {"abs", abs}, {"exp", exp}, {"log", log}, {"sqrt", sqrt}, {"rsqrt", rsqrt},
      {"sin", sin}, {"cos", cos}, {"tanh", tanh}, {"erf", erf}, {"sigmoid", sigmoid},
      {"relu", relu}, {"gelu", gelu}, {"gelu_tanh", gelu_tanh}, {"silu", silu},
      {"softplus", softplus}, {"reciprocal", reciprocal}, {"log1p", log1p}, {"expm1", expm1},
      {"add", add}, {"sub", sub}, {"mul", mul}, {"div", div}, {"pow", pow},
      {"maximum", maximum}, {"minimum", minimum}, {"remainder", remainder}, {"where", where},
      {"cast", cast},
  };
  for (const char* op : {"floor", "ceil", "round", "trunc", "sign", "floor_div"}) {
    rules.push_back({op, nullptr, "flat wherever it has a slope"});
  }
  for (const char* op : {"logical_not", "isnan", "eq", "ne", "lt", "le", "gt", "ge", "and", "or",
                         "xor"}) {
    rules.push_back({op, nullptr, "its result is no floating value"});
  }
  return rules;
}

}  // namespace rm::autograd
