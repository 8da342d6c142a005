// The nodes that converters build: typed by inference, computed at once where all is known.
#include <algorithm>

#include "base/error.hpp"
#include "onnx/importer.hpp"
#include "ops/evaluate.hpp"
#include "ops/infer.hpp"
#include "ops/registry.hpp"

namespace rm::onnx {
namespace {

constexpr int64_t kMaxFolded = 4096;            // elements of a constant that is computed now
constexpr int64_t kMaxMade = int64_t{1} << 29;  // bytes of all constants that an import makes

}  // namespace

ValueId Importer::op(std::string name, std::vector<ValueId> operands, ir::Attrs attrs) {
  ir::Node made{std::move(name), std::move(operands), {}, std::move(attrs)};
  std::vector<ir::TensorType> types = ops::infer(graph(), made);
  return folded(graph().append(made.op, made.operands, made.attrs, types[0]));
}

ValueId Importer::typed(std::string name, std::vector<ValueId> operands, ir::Attrs attrs,
                        ir::TensorType t) {
  return folded(
      graph().append(std::move(name), std::move(operands), std::move(attrs), std::move(t)));
}

// A small value that depends on literals alone is computed now: shapes are often computed so.
ValueId Importer::folded(ValueId value) {
  const ir::Node& made = graph().nodes.back();
  const ir::TensorType t = type(value);
  if (made.op == "conv" || made.op == "pool")
    return value;  // windows may be far larger than results
  if (!t.is_static() || made.operands.empty() || t.num_elements() > kMaxFolded) return value;
  int64_t operand_elements = 0;
  for (ValueId v : made.operands) {
    if (v != ir::kNoValue && type(v).is_static()) operand_elements += type(v).num_elements();
  }
  if (operand_elements > 4 * kMaxFolded || !has_room(t.num_elements())) return value;
  std::vector<ops::HostTensor> held;
  for (ValueId v : made.operands) {
    if (v == ir::kNoValue || graph().value(v).kind != ir::ValueKind::kLiteral) return value;
    held.push_back({type(v), graph().value(v).literal});
  }
  ops::HostOperands operands;
  for (const ops::HostTensor& h : held) operands.push_back(&h);
  std::vector<ops::HostTensor> results = ops::evaluate_node(graph(), made, operands);
  return graph().add_literal(t, results[0].bytes);
}

bool Importer::has_room(int64_t elements) {
  made_ += elements * 8 + 64;
  return made_ <= kMaxMade;
}

ValueId Importer::number(ValueId like, double value) {
  return ir::add_scalar(graph(), type(like).dtype, value);
}
ValueId Importer::cast(ValueId v, ir::DType to) {
  return type(v).dtype == to ? v : typed("cast", {v}, {}, {to, dims(v)});
}
ValueId Importer::reshape(ValueId v, Dims shape) {
  return dims(v) == shape ? v : op("reshape", {v}, {{"shape", std::move(shape)}});
}
ValueId Importer::permute(ValueId v, Ints axes) {
  bool is_same = true;
  for (size_t k = 0; k < axes.size(); ++k) is_same = is_same && axes[k] == static_cast<int64_t>(k);
  return is_same ? v : op("permute", {v}, {{"axes", std::move(axes)}});
}
ValueId Importer::reduce(std::string kind, ValueId v, const Ints& axes, bool keepdim) {
  return op(
      "reduce", {v},
      {{"kind", std::move(kind)}, {"axes", axes}, {"keepdim", static_cast<int64_t>(keepdim)}});
}
ValueId Importer::slice(ValueId v, int64_t axis, Dim start, Dim stop, int64_t step) {
  return op("slice", {v},
            {{"axis", axis}, {"start", Dims{start}}, {"stop", Dims{stop}}, {"step", step}});
}

ValueId Importer::expand(ValueId v, Dims shape) {
  return dims(v) == shape ? v : op("expand", {v}, {{"shape", std::move(shape)}});
}
ValueId Importer::concat(const std::vector<ValueId>& parts, int64_t axis) {
  return parts.size() == 1 ? parts[0] : op("concat", parts, {{"axis", axis}});
}

ValueId Importer::count(const Dim& n, const Dim& start, int64_t step) {
  if (n.is_static() && start.is_static() && n.value() <= kMaxFolded) {
    Ints values;
    for (int64_t k = 0; k < n.value(); ++k) values.push_back(start.value() + k * step);
    return integers(values);
  }
  return typed("iota", {}, {{"start", Dims{start}}, {"step", step}}, {ir::DType::kI64, {n}});
}

ValueId Importer::integers(const Ints& values) {
  const ir::TensorType t{ir::DType::kI64, {Dim(static_cast<int64_t>(values.size()))}};
  if (!has_room(t.num_elements())) refuse("constants that memory can hold", "more");
  return graph().add_literal(t, ops::from_ints(t, values).bytes);
}

ValueId Importer::floats(const std::vector<double>& values, Dims shape, ir::DType dtype) {
  Weight w;
  w.type = {dtype, std::move(shape)};
  if (!has_room(w.type.num_elements())) refuse("constants that memory can hold", "more");
  w.decoded = ops::from_doubles(w.type, values).bytes;
  return add_weight(std::move(w));
}

ValueId Importer::take(ValueId v, int64_t axis, ValueId numbers) {
  return op("index", {v, numbers}, {{"axes", Ints{axis}}});
}

ValueId Importer::reversed(ValueId v, int64_t axis) {
  const Dim n = dims(v)[static_cast<size_t>(axis)];
  return take(v, axis, count(n, n - Dim(1), -1));
}

Importer::Sorted Importer::sorted(ValueId v, int64_t axis, bool descending, int64_t k) {
  ir::Node made{"sort",
                {v},
                {},
                {{"axis", axis}, {"descending", static_cast<int64_t>(descending)}, {"k", k}}};
  const std::vector<ir::TensorType> types = ops::infer(graph(), made);
  const ValueId values = graph().append(made.op, made.operands, made.attrs, types[0]);
  const ValueId indices = graph().add_result(types[1]);
  graph().nodes.back().results.push_back(indices);
  return {values, indices};
}

}  // namespace rm::onnx
