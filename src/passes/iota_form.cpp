// The progression is followed through each view by tracking which axis carries it.
#include "passes/iota_form.hpp"

#include "ir/scalar.hpp"
#include "ops/infer.hpp"

namespace rm::passes {
namespace {

using ir::Dim;
using ir::Dims;
using ir::Node;
using ir::ValueId;
using Form = std::optional<IotaForm>;

bool is_index_type(ir::DType dtype) { return dtype == ir::DType::kI64 || dtype == ir::DType::kI32; }

Form of_literal(const ir::Value& value) {
  const Dims& dims = value.type.dims;
  int64_t n = value.type.num_elements();
  if (n == 0 || n > 4096) return std::nullopt;
  auto element = [&](int64_t i) {
    return ir::load_int(
        value.type.dtype,
        value.literal.data() + static_cast<size_t>(i) * ir::size_bytes(value.type.dtype));
  };
  IotaForm form{element(0), 0, -1};
  for (size_t d = 0; d < dims.size(); ++d) {
    if (dims[d] == Dim(1)) continue;
    if (form.axis >= 0) return std::nullopt;
    form.axis = static_cast<int>(d);
  }
  if (n > 1) form.step = element(1) - element(0);
  for (int64_t i = 0; i < n; ++i) {
    if (element(i) != element(0) + i * form.step) return std::nullopt;
  }
  if (form.step == 0) form.axis = -1;
  return form;
}

// A reshape that only inserts or removes sizes of 1 keeps the axis, counted among the others.
Form through_reshape(IotaForm form, const Dims& from, const Dims& to) {
  if (form.axis < 0) return form;
  std::vector<int> kept_from, kept_to;
  for (size_t d = 0; d < from.size(); ++d) {
    if (from[d] != Dim(1)) kept_from.push_back(static_cast<int>(d));
  }
  for (size_t d = 0; d < to.size(); ++d) {
    if (to[d] != Dim(1)) kept_to.push_back(static_cast<int>(d));
  }
  if (kept_from.size() != kept_to.size()) return std::nullopt;
  for (size_t i = 0; i < kept_from.size(); ++i) {
    if (from[static_cast<size_t>(kept_from[i])] != to[static_cast<size_t>(kept_to[i])])
      return std::nullopt;
    if (kept_from[i] == form.axis) form.axis = kept_to[i];
  }
  return form;
}

Form through_expand(IotaForm form, const Dims& from, const Dims& to) {
  if (form.axis < 0) return form;
  auto axis = static_cast<size_t>(form.axis), moved = axis + to.size() - from.size();
  if (from[axis] != to[moved]) return std::nullopt;
  form.axis = static_cast<int>(moved);
  return form;
}

Form through_permute(IotaForm form, const Node& node) {
  const auto& axes = node.ints("axes");
  for (size_t d = 0; form.axis >= 0 && d < axes.size(); ++d) {
    if (axes[d] != form.axis) continue;
    form.axis = static_cast<int>(d);
    break;
  }
  return form;
}

Form through_slice(IotaForm form, const Node& node) {
  if (form.axis < 0 || form.axis != node.i("axis")) return form;
  form.start = form.start + node.dims("start")[0] * Dim(form.step);
  form.step *= node.i_or("step", 1);
  return form;
}

// a + b and a - b where one of them is the same everywhere, or both run along one axis.
Form of_sum(const Rewriter& rw, const Node& node) {
  Form a = iota_form(rw, node.operands[0]), b = iota_form(rw, node.operands[1]);
  if (!a || !b) return std::nullopt;
  const Dims& to = rw.dims(node.result());
  Form wide_a = through_expand(*a, rw.dims(node.operands[0]), to);
  Form wide_b = through_expand(*b, rw.dims(node.operands[1]), to);
  if (!wide_a || !wide_b) return std::nullopt;
  if (wide_a->axis >= 0 && wide_b->axis >= 0 && wide_a->axis != wide_b->axis) return std::nullopt;
  int64_t sign = node.op == "sub" ? -1 : 1;
  IotaForm sum{wide_a->start + wide_b->start * Dim(sign), wide_a->step + sign * wide_b->step,
               std::max(wide_a->axis, wide_b->axis)};
  if (sum.step == 0) sum.axis = -1;
  return sum;
}

// Pieces that continue each other along the concatenated axis: [-1], [0, 1, ...].
Form of_concat(const Rewriter& rw, const Node& node) {
  auto axis = static_cast<int>(node.i("axis"));
  Form whole;
  Dim length = 0;
  // A piece of size 1 fits any step: the step is that of the first longer one.
  int64_t step = 0;
  for (ValueId v : node.operands) {
    Form piece = iota_form(rw, v);
    if (!piece || (piece->axis >= 0 && piece->axis != axis)) return std::nullopt;
    if (piece->axis < 0 && rw.dims(v)[static_cast<size_t>(axis)] != Dim(1)) return std::nullopt;
    if (piece->axis >= 0 && step == 0) step = piece->step;
    if (piece->axis >= 0 && piece->step != step) return std::nullopt;
    if (!whole) whole = IotaForm{piece->start, 0, axis};
  }
  for (ValueId v : node.operands) {
    if (iota_form(rw, v)->start != whole->start + Dim(step) * length) return std::nullopt;
    length = length + rw.dims(v)[static_cast<size_t>(axis)];
  }
  whole->step = step;
  return step == 0 ? std::nullopt : whole;
}

Form of_node(const Rewriter& rw, const Node& node) {
  const Dims& to = rw.dims(node.result());
  if (node.op == "iota") return IotaForm{node.dims("start")[0], node.i_or("step", 1), 0};
  if (node.op == "dim_value") return IotaForm{node.dims("value")[0], 0, -1};
  if (node.op == "full") {
    const auto* value = std::get_if<int64_t>(&node.attrs.at("value"));
    if (value == nullptr) return std::nullopt;
    return IotaForm{*value, 0, -1};
  }
  if (node.op == "add" || node.op == "sub") return of_sum(rw, node);
  if (node.op == "concat") return of_concat(rw, node);
  bool view = node.op == "reshape" || node.op == "expand" || node.op == "permute" ||
              node.op == "slice" || node.op == "cast";
  if (!view) return std::nullopt;
  Form form = iota_form(rw, node.operands[0]);
  if (!form) return form;
  const Dims& from = rw.dims(node.operands[0]);
  if (node.op == "reshape") return through_reshape(*form, from, to);
  if (node.op == "expand") return through_expand(*form, from, to);
  if (node.op == "permute") return through_permute(*form, node);
  if (node.op == "slice") return through_slice(*form, node);
  return form;  // a cast between i64 and i32
}

// Along a size of 1 a progression is a constant.
Form normalised(Form form, const Dims& dims) {
  if (form && form->axis >= 0 && dims[static_cast<size_t>(form->axis)] == Dim(1)) {
    form->axis = -1;
    form->step = 0;
  }
  return form;
}

}  // namespace

Form iota_form(const Rewriter& rw, const Node& node) {
  if (!is_index_type(rw.dtype(node.result()))) return std::nullopt;
  return normalised(of_node(rw, node), rw.dims(node.result()));
}

Form iota_form(const Rewriter& rw, ValueId v) {
  if (v == ir::kNoValue || !is_index_type(rw.dtype(v))) return std::nullopt;
  const ir::Value& value = rw.graph().value(v);
  if (value.kind == ir::ValueKind::kLiteral) return normalised(of_literal(value), value.type.dims);
  const Node* node = rw.def(v);
  return node == nullptr ? std::nullopt : iota_form(rw, *node);
}

IotaRange range(const IotaForm& form, const Dims& dims) {
  if (form.axis < 0) return {form.start, form.start};
  Dim last = form.start + (dims[static_cast<size_t>(form.axis)] - 1) * Dim(form.step);
  return form.step >= 0 ? IotaRange{form.start, last} : IotaRange{last, form.start};
}

}  // namespace rm::passes
