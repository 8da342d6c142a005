// softmax, cross_entropy, layer_norm, rms_norm, group_norm. Mean and scale of the rows are computed again from the operand.
#include <algorithm>

#include "autograd/rules.hpp"

namespace rm::autograd {
namespace {

using ir::Dim;
using ir::Dims;

const ir::Node* maker(const Builder& b, ValueId v) {
  const std::vector<ir::Node>& nodes = b.graph().nodes;
  const auto found = std::find_if(nodes.rbegin(), nodes.rend(),
                                  [&](const ir::Node& n) { return n.result() == v; });
  return found == nodes.rend() ? nullptr : &*found;
}

// Which element of each row of `y` a gather along `axis` picks, if there is one that picks one.
ValueId picked_by(const Builder& b, ValueId y, int64_t axis) {
  for (const ir::Node& node : b.graph().nodes) {
    if (node.op == "gather" && node.operands[0] == y && node.i("axis") == axis &&
        b.size(node.operands[1], static_cast<size_t>(axis)) == 1) {
      return node.operands[1];
    }
  }
  return ir::kNoValue;
}

// The sum over `axis` of the gradient of `y`. That of a gather of one element a row, as losses over
// classes have it, is where(0, 1, ... = id, g, 0): its sum is g, for an id that is out of range is an
// error of the gather.
ValueId sum_of_gradient(Adjoint& a, int64_t axis) {
  Builder& b = a.b;
  const ir::Node* chosen = maker(b, a.dy());
  const ValueId id = picked_by(b, a.y(), axis);
  if (id != ir::kNoValue && chosen != nullptr && chosen->op == "where") {
    const ValueId g = chosen->operands[1];
    const ir::Node* equal = maker(b, chosen->operands[0]);
    const bool picked = equal != nullptr && equal->op == "eq" && equal->operands[1] == id;
    if (picked && b.rank(g) == b.rank(id) && b.dims(g) == b.dims(id)) return g;
  }
  return b.reduce("sum", a.dy(), {axis}, true);
}

void softmax(Adjoint& a) {
  Builder& b = a.b;
  const int64_t axis = a.node.i_or("axis", static_cast<int64_t>(b.rank(a.x())) - 1);
  if (a.node.i_or("log", 0) != 0) {
    ValueId total = sum_of_gradient(a, axis);
    a.din[0] = b.sub(a.dy(), b.mul(b.op("exp", {a.y()}), total));
    return;
  }
  ValueId mean = b.reduce("sum", b.mul(a.dy(), a.y()), {axis}, true);
  a.din[0] = b.mul(a.y(), b.sub(a.dy(), mean));
}

// The log-sum-exp, its second result, is there for this and has no gradient.
void cross_entropy(Adjoint& a) {
  if (a.dout[0] == ir::kNoValue) return;
  a.din[0] = a.b.op("cross_entropy_backward", {a.x(0), a.x(1), a.node.results[1], a.dy()});
}

// The last `count` axes.
Ints trailing(const Builder& b, ValueId v, size_t count) {
  Ints axes;
  for (size_t i = b.rank(v) - count; i < b.rank(v); ++i) axes.push_back(static_cast<int64_t>(i));
  return axes;
}

// By the operator that devices have a kernel for, over one last axis.
void norm_whole(Adjoint& a, bool centred, size_t count) {
  Builder& b = a.b;
  Dims rows = b.dims(a.x());
  int64_t inner = 1;
  for (size_t i = 0; i < count; ++i, rows.pop_back()) inner *= rows.back().value();
  rows.emplace_back(inner);
  const ValueId weight = a.has(1) ? b.reshape(a.x(1), {Dim(inner)}) : ir::kNoValue;
  ir::Attrs attrs{{"eps", a.node.f("eps")}};
  if (a.node.f_or("weight_offset", 0.0) != 0) attrs["weight_offset"] = a.node.f("weight_offset");
  const std::vector<ValueId> made =
      b.ops(centred ? "layer_norm_backward" : "rms_norm_backward",
            {b.reshape(a.dy(), rows), b.reshape(a.x(), rows), weight}, std::move(attrs));
  for (size_t i = 0; i < made.size(); ++i) {
    if (a.wants(i)) a.din[i] = b.reshape(made[i], b.dims(a.x(i)));
  }
}

// y = n w + c with n = (x - mean) r: dx = r (g - mean g - n mean(g n)) for g = dy w.
void norm(Adjoint& a, bool centred) {
  Builder& b = a.b;
  const auto count = static_cast<size_t>(a.node.i_or("num_axes", 1));
  const bool served = b.serves(centred ? "layer_norm_backward" : "rms_norm_backward");
  if (served && b.dtype(a.x()) != ir::DType::kF64) return norm_whole(a, centred, count);
  const Ints axes = trailing(b, a.x(), count);
  ValueId h = a.x();
  if (centred) h = b.sub(h, b.reduce("mean", h, axes, true));
  ValueId variance = b.reduce("mean", b.mul(h, h), axes, true);
  ValueId r = b.op("rsqrt", {b.plus(variance, a.node.f("eps"))});
  ValueId n = b.mul(h, r);
  if (a.wants(1)) a.give(1, b.mul(a.dy(), n));
  if (centred && a.wants(2)) a.give(2, a.dy());
  if (!a.wants(0)) return;
  ValueId g = a.dy();
  if (a.has(1)) {
    const double offset = a.node.f_or("weight_offset", 0.0);
    g = b.mul(g, offset == 0 ? a.x(1) : b.plus(a.x(1), offset));
  }
  ValueId along = b.mul(n, b.reduce("mean", b.mul(g, n), axes, true));
  ValueId rest = b.sub(g, along);
  if (centred) rest = b.sub(rest, b.reduce("mean", g, axes, true));
  a.din[0] = b.mul(rest, r);
}
void layer_norm(Adjoint& a) { norm(a, true); }
void rms_norm(Adjoint& a) { norm(a, false); }

// The same with one mean and scale for each group of a sample's channels; weight and bias are by
// channel.
void group_norm(Adjoint& a) {
  Builder& b = a.b;
  const Dims whole = b.dims(a.x());
  int64_t each = whole[1].value() / a.node.i("groups");
  for (size_t i = 2; i < whole.size(); ++i) each *= whole[i].value();
  const Dims grouped{whole[0], Dim(a.node.i("groups")), Dim(each)};
  ValueId h = b.reshape(a.x(), grouped);
  h = b.sub(h, b.reduce("mean", h, {2}, true));
  ValueId r = b.op("rsqrt", {b.plus(b.reduce("mean", b.mul(h, h), {2}, true), a.node.f("eps"))});
  ValueId n = b.mul(h, r);
  Ints channel = all_axes(whole.size());
  channel.erase(channel.begin() + 1);
  if (a.wants(1)) a.din[1] = b.reduce("sum", b.mul(a.dy(), b.reshape(n, whole)), channel, false);
  if (a.wants(2)) a.din[2] = b.reduce("sum", a.dy(), channel, false);
  if (!a.wants(0)) return;
  ValueId g = a.dy();
  if (a.has(1)) {
    Dims column(whole.size(), Dim(1));
    column[1] = whole[1];
    g = b.mul(g, b.reshape(a.x(1), std::move(column)));
  }
  g = b.reshape(g, grouped);
  ValueId along = b.mul(n, b.reduce("mean", b.mul(g, n), {2}, true));
  ValueId rest = b.sub(b.sub(g, along), b.reduce("mean", g, {2}, true));
  a.din[0] = b.reshape(b.mul(rest, r), whole);
}

}  // namespace

std::vector<NamedRule> norm_rules() {
  return {{"softmax", softmax}, {"cross_entropy", cross_entropy}, {"layer_norm", layer_norm}, {"rms_norm", rms_norm},
          {"group_norm", group_norm}};
}

}  // namespace rm::autograd
