// Views that do nothing, views of views, views of constants.
#include <algorithm>
#include <cmath>

#include "ops/infer.hpp"
#include "ops/registry.hpp"
#include "passes/rules/rules.hpp"

namespace rm::passes {
namespace {

using ir::Dim;
using ir::Dims;
using ir::Node;
using ir::ValueId;

bool is_sorted_axes(const std::vector<int64_t>& axes) {
  return std::is_sorted(axes.begin(), axes.end());
}

}  // namespace

bool drop_identity_view(Rewriter& rw, const Node& node) {
  bool typed =
      node.op == "reshape" || node.op == "expand" || node.op == "slice" || node.op == "cast";
  bool identity = (typed && rw.type(node.result()) == rw.type(node.operands[0])) ||
                  (node.op == "permute" && is_sorted_axes(node.ints("axes"))) ||
                  (node.op == "concat" && node.operands.size() == 1);
  return identity && rw.replace(node.result(), node.operands[0]);
}

bool compose_reshapes(Rewriter& rw, const Node& node) {
  if (node.op != "reshape") return false;
  const Node* inner = rw.def(node.operands[0], "reshape");
  if (inner == nullptr) return false;
  return rw.replace(node.result(), rw.emit_like(node, {inner->operands[0]}));
}

bool compose_permutes(Rewriter& rw, const Node& node) {
  if (node.op != "permute") return false;
  const Node* inner = rw.def(node.operands[0], "permute");
  if (inner == nullptr) return false;
  std::vector<int64_t> axes;
  for (int64_t a : node.ints("axes")) axes.push_back(inner->ints("axes")[static_cast<size_t>(a)]);
  return rw.replace(node.result(), rw.emit("permute", {inner->operands[0]}, {{"axes", axes}},
                                           rw.type(node.result())));
}

bool compose_slices(Rewriter& rw, const Node& node) {
  if (node.op != "slice") return false;
  const Node* inner = rw.def(node.operands[0], "slice");
  if (inner == nullptr || inner->i("axis") != node.i("axis") || inner->i_or("step", 1) != 1) {
    return false;
  }
  const Dim& base = inner->dims("start")[0];
  ir::Attrs attrs{{"axis", node.i("axis")},
                  {"start", Dims{base + node.dims("start")[0]}},
                  {"step", node.i_or("step", 1)},
                  {"stop", Dims{base + node.dims("stop")[0]}}};
  return rw.replace(node.result(), rw.emit("slice", {inner->operands[0]}, std::move(attrs),
                                           rw.type(node.result())));
}

bool compose_expands(Rewriter& rw, const Node& node) {
  if (node.op != "expand") return false;
  const Node* inner = rw.def(node.operands[0], "expand");
  if (inner == nullptr) return false;
  return rw.replace(node.result(), rw.emit_like(node, {inner->operands[0]}));
}

// Moving only sizes of 1 changes no element's place.
bool permute_of_ones_is_reshape(Rewriter& rw, const Node& node) {
  if (node.op != "permute") return false;
  const Dims& from = rw.dims(node.operands[0]);
  int64_t last = -1;
  for (int64_t a : node.ints("axes")) {
    if (from[static_cast<size_t>(a)] == Dim(1)) continue;
    if (a < last) return false;
    last = a;
  }
  return rw.replace(node.result(), rw.reshape(node.operands[0], rw.dims(node.result())));
}

bool view_of_splat_is_full(Rewriter& rw, const Node& node) {
  bool view = node.op == "reshape" || node.op == "expand" || node.op == "permute" ||
              node.op == "slice" || node.op == "cast";
  if (!view) return false;
  std::optional<double> value = rw.splat(node.operands[0]);
  if (!value || std::fabs(*value) > 9e15) return false;  // beyond 2^53 a double loses bits
  if (node.op == "cast" &&
      ir::is_floating(rw.dtype(node.operands[0])) != ir::is_floating(rw.dtype(node.result()))) {
    return false;  // left to fold, which converts exactly
  }
  ir::Attr attr = *value;
  if (!ir::is_floating(rw.dtype(node.result()))) attr = static_cast<int64_t>(*value);
  return rw.replace(node.result(), rw.emit("full", {}, {{"value", attr}}, rw.type(node.result())));
}

// Drops operands without elements and flattens a concat of concats along the same axis.
bool simplify_concat(Rewriter& rw, const Node& node) {
  if (node.op != "concat") return false;
  auto axis = static_cast<size_t>(node.i("axis"));
  std::vector<ValueId> operands;
  for (ValueId v : node.operands) {
    if (rw.dims(v)[axis] == Dim(0)) continue;
    const Node* inner = rw.def(v, "concat");
    if (inner != nullptr && inner->i("axis") == node.i("axis") && rw.single_use(v)) {
      operands.insert(operands.end(), inner->operands.begin(), inner->operands.end());
    } else {
      operands.push_back(v);
    }
  }
  if (operands.empty() || operands == node.operands) return false;
  if (operands.size() == 1) return rw.replace(node.result(), operands[0]);
  return rw.replace(node.result(), rw.emit_like(node, std::move(operands)));
}

// x beside itself is a view of x, which is copied once if it has to be.
bool concat_of_one_value_is_repeat(Rewriter& rw, const Node& node) {
  if (node.op != "concat" || node.operands.size() < 2) return false;
  const ValueId x = node.operands[0];
  if (std::any_of(node.operands.begin(), node.operands.end(), [&](ValueId v) { return v != x; })) {
    return false;
  }
  const auto axis = static_cast<std::ptrdiff_t>(node.i("axis"));
  Dims parted = rw.dims(x);
  if (!parted[static_cast<size_t>(axis)].is_static()) return false;
  parted.insert(parted.begin() + axis, Dim(1));
  Dims repeated = parted;
  repeated[static_cast<size_t>(axis)] = Dim(static_cast<int64_t>(node.operands.size()));
  const ValueId part = rw.reshape(x, parted);
  const ValueId wide =
      rw.emit("expand", {part}, {{"shape", repeated}}, {rw.dtype(x), repeated});
  const Dims shape = rw.dims(node.result());  // a copy: emitting moves values
  return rw.replace(node.result(), rw.reshape(wide, shape));
}

// A slice that is exactly one operand of a concat is that operand.
bool slice_of_concat(Rewriter& rw, const Node& node) {
  if (node.op != "slice" || node.i_or("step", 1) != 1) return false;
  const Node* concat = rw.def(node.operands[0], "concat");
  if (concat == nullptr || concat->i("axis") != node.i("axis")) return false;
  auto axis = static_cast<size_t>(node.i("axis"));
  Dim at = 0;
  for (ValueId v : concat->operands) {
    Dim end = at + rw.dims(v)[axis];
    if (at == node.dims("start")[0] && end == node.dims("stop")[0]) {
      return rw.replace(node.result(), v);
    }
    at = end;
  }
  return false;
}

// Consumers that broadcast read the source of an expand when the result stays the same.
bool leave_broadcast_to_consumer(Rewriter& rw, const Node& node) {
  const ops::OpDef* def = ops::find(node.op);
  bool broadcasts = def != nullptr && def->is(ops::kElementwise) && node.operands.size() > 1;
  bool mask = (node.op == "sdpa" || node.op == "sdpa_backward") && operand(node, 3) != ir::kNoValue;
  if (!broadcasts && !mask && node.op != "matmul") return false;
  for (size_t i = mask ? 3 : 0; i < (mask ? 4 : node.operands.size()); ++i) {
    const Node* expand = rw.def(node.operands[i], "expand");
    if (expand == nullptr) continue;
    Node narrow = node;
    narrow.operands[i] = expand->operands[0];
    if (node.op == "matmul") {
      // The two matrix dims are not broadcast.
      const Dims &from = rw.dims(narrow.operands[i]), &to = rw.dims(node.operands[i]);
      if (from.size() < 2 || from[from.size() - 1] != to[to.size() - 1] ||
          from[from.size() - 2] != to[to.size() - 2]) {
        continue;
      }
    }
    if (ops::infer(rw.graph(), narrow)[0] != rw.type(node.result())) continue;
    return rw.replace_all(node, node, std::move(narrow.operands));
  }
  return false;
}

}  // namespace rm::passes
