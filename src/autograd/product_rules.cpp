// Matrix products and attention.
#include <limits>

#include "autograd/rules.hpp"

namespace rm::autograd {
namespace {

using ir::Dim;
using ir::Dims;

void matmul(Adjoint& a) {
  if (a.wants(0)) a.give(0, a.b.matmul(a.dy(), a.b.transpose(a.x(1))));
  if (a.wants(1)) a.give(1, a.b.matmul(a.b.transpose(a.x(0)), a.dy()));
}

// All axes but the last as one.
ValueId rows_of(Builder& b, ValueId v) {
  if (b.rank(v) == 2) return v;
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < b.rank(v); ++i) rows *= b.size(v, i);
  return b.reshape(v, {Dim(rows), b.dims(v).back()});
}

void linear(Adjoint& a) {
  Builder& b = a.b;
  ValueId rows = rows_of(b, a.dy());
  if (a.wants(0)) a.din[0] = b.reshape(b.matmul(rows, a.x(1)), b.dims(a.x(0)));
  if (a.wants(1)) a.din[1] = b.matmul(b.transpose(rows), rows_of(b, a.x(0)));
  if (a.wants(2)) a.din[2] = b.reduce("sum", rows, {0}, false);
}

// [B,G,T,D] -> [B,H,T,D]: every group serves H / G heads.
ValueId heads_of(Builder& b, ValueId v, int64_t heads) {
  const Dims d = b.dims(v);
  const int64_t groups = d[1].value();
  if (groups == heads) return v;
  ValueId wide = b.expand(b.reshape(v, {d[0], d[1], Dim(1), d[2], d[3]}),
                          {d[0], d[1], Dim(heads / groups), d[2], d[3]});
  return b.reshape(wide, {d[0], Dim(heads), d[2], d[3]});
}

ValueId groups_of(Builder& b, ValueId v, const Dims& wanted) {
  const Dims d = b.dims(v);
  if (d == wanted) return v;
  ValueId split = b.reshape(v, {d[0], wanted[1], Dim(d[1].value() / wanted[1].value()), d[2], d[3]});
  return b.reduce("sum", split, {2}, false);
}

// The probabilities again, from the scores; a row with every key masked has none.
ValueId probabilities(Adjoint& a, ValueId keys) {
  Builder& b = a.b;
  ValueId scores = b.scaled(b.matmul(a.x(0), b.transpose(keys)), a.node.f("scale"));
  const ValueId never = b.number(scores, -std::numeric_limits<double>::infinity());
  if (a.node.i_or("is_causal", 0) != 0) {
    const int64_t rows = b.size(scores, 2), columns = b.size(scores, 3);
    ValueId row = b.reshape(b.iota(rows), {Dim(rows), Dim(1)});
    scores = b.where(b.op("ge", {row, b.iota(columns)}), scores, never);
  }
  if (!a.has(3)) return b.op("softmax", {scores}, {{"axis", int64_t{3}}, {"log", int64_t{0}}});
  scores = b.dtype(a.x(3)) == ir::DType::kBool ? b.where(a.x(3), scores, never)
                                               : b.add(scores, a.x(3));
  ValueId dead = b.op("eq", {b.reduce("max", scores, {3}, true), never});
  ValueId p = b.op("softmax", {scores}, {{"axis", int64_t{3}}, {"log", int64_t{0}}});
  return b.where(dead, b.number(p, 0), p);
}

void sdpa_whole(Adjoint& a) {
  const auto given = [&](size_t i) { return a.has(i) ? a.x(i) : ir::kNoValue; };
  const ValueId lse = a.b.saved(a.y(), "lse");
  const std::vector<ValueId> made = a.b.ops(
      "sdpa_backward", {a.x(0), a.x(1), a.x(2), given(3), given(4), a.y(), lse, a.dy()},
      {{"scale", a.node.f("scale")}, {"is_causal", a.node.i_or("is_causal", 0)}});
  for (size_t i = 0; i < made.size(); ++i) {
    if (a.wants(i)) a.din[i] = made[i];
  }
}

void sdpa(Adjoint& a) {
  Builder& b = a.b;
  if (is_attention_whole(b, a.node, a.wanted)) return sdpa_whole(a);
  const int64_t heads = b.size(a.x(0), 1);
  ValueId keys = heads_of(b, a.x(1), heads), values = heads_of(b, a.x(2), heads);
  ValueId p = probabilities(a, keys);
  if (a.wants(2)) a.din[2] = groups_of(b, b.matmul(b.transpose(p), a.dy()), b.dims(a.x(2)));
  if (!a.wants(0) && !a.wants(1) && !a.wants(3)) return;
  ValueId dp = b.matmul(a.dy(), b.transpose(values));
  // sum_t dp p is dy . y: over the head's width instead of over the keys.
  ValueId mean = b.reduce("sum", b.mul(a.dy(), a.y()), {3}, true);
  ValueId ds = b.mul(p, b.sub(dp, mean));
  if (a.wants(3)) a.give(3, ds);
  ValueId scaled = b.scaled(ds, a.node.f("scale"));
  if (a.wants(0)) a.din[0] = b.matmul(scaled, keys);
  if (a.wants(1)) {
    a.din[1] = groups_of(b, b.matmul(b.transpose(scaled), a.x(0)), b.dims(a.x(1)));
  }
}

}  // namespace

// A mask gets no gradient from it; its kernels have one head size, of up to 512. An added mask stays composed:
// where all of a row's keys are closed by the lowest finite number, the log-sum-exp says no longer how many
// there are (lowest + log n rounds to lowest), and probabilities made of it are 1 instead of 1 / n.
bool is_attention_whole(const Builder& b, const ir::Node& node, const std::vector<char>& wanted) {
  if (!b.serves("sdpa_backward") || (wanted.size() > 3 && wanted[3] != 0)) return false;
  const bool masked = node.operands.size() > 3 && node.operands[3] != ir::kNoValue;
  if (masked && b.dtype(node.operands[3]) != ir::DType::kBool) return false;
  const int64_t width = b.size(node.operands[0], 3);
  return b.dtype(node.operands[0]) != ir::DType::kF64 && width > 0 && width <= 512 &&
         b.size(node.operands[2], 3) == width;
}

std::vector<NamedRule> product_rules() {
  return {{"matmul", matmul}, {"linear", linear}, {"sdpa", sdpa}};
}

}  // namespace rm::autograd
