// Nodes that would do nothing are not made: a reshape to the same shape, a cast to the same type.
#include "autograd/builder.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.hpp"
#include "ops/registry.hpp"

namespace rm::autograd {

using ir::Dim;
using ir::Dims;

Ints all_axes(size_t n) {
  Ints axes(n);
  std::iota(axes.begin(), axes.end(), 0);
  return axes;
}

ValueId Builder::op(std::string name, std::vector<ValueId> operands, ir::Attrs attrs) {
  ir::Node node{std::move(name), std::move(operands), {}, std::move(attrs)};
  std::vector<ir::TensorType> types = rm::ops::infer(graph_, node);
  return graph_.append(node.op, node.operands, node.attrs, types[0]);
}

std::vector<ValueId> Builder::ops(std::string name, std::vector<ValueId> operands, ir::Attrs attrs) {
  ir::Node node{std::move(name), std::move(operands), {}, std::move(attrs)};
  for (ir::TensorType& type : rm::ops::infer(graph_, node)) {
    node.results.push_back(graph_.add_result(std::move(type)));
  }
  graph_.nodes.push_back(node);
  return node.results;
}

ValueId Builder::saved(ValueId v, const std::string& attr) {
  std::vector<ir::Node>& nodes = graph_.nodes;
  const auto found = std::find_if(nodes.begin(), nodes.end(),
                                  [&](const ir::Node& n) { return n.result() == v; });
  if (found == nodes.end()) throw_invalid("[autograd] expected a result of a node, got another");
  if (found->i_or(attr, 0) == 0) {
    found->attrs[attr] = int64_t{1};
    found->results.push_back(graph_.add_result(rm::ops::infer(graph_, *found).back()));
  }
  return found->results.back();
}

ValueId Builder::typed(std::string name, std::vector<ValueId> operands, ir::Attrs attrs,
                       ir::TensorType type) {
  return graph_.append(std::move(name), std::move(operands), std::move(attrs), std::move(type));
}

ValueId Builder::scalar(ir::DType dtype, double value) {
  if (std::isnan(value)) return ir::add_scalar(graph_, dtype, value);
  auto [it, fresh] = scalars_.try_emplace({dtype, value}, ir::kNoValue);
  if (fresh) it->second = ir::add_scalar(graph_, dtype, value);
  return it->second;
}

ValueId Builder::full(ir::TensorType type, double value) {
  ir::Attr attr = value;
  if (!ir::is_floating(type.dtype)) attr = static_cast<int64_t>(value);
  return typed("full", {}, {{"value", attr}}, std::move(type));
}

ValueId Builder::iota(int64_t size, ir::DType dtype) {
  return typed("iota", {}, {{"start", Dims{Dim(0)}}, {"step", int64_t{1}}}, {dtype, {Dim(size)}});
}

ValueId Builder::cast(ValueId v, ir::DType to) {
  if (dtype(v) == to) return v;
  return typed("cast", {v}, {}, {to, dims(v)});
}

ValueId Builder::reshape(ValueId v, Dims wanted) {
  if (dims(v) == wanted) return v;
  return op("reshape", {v}, {{"shape", std::move(wanted)}});
}

ValueId Builder::permute(ValueId v, Ints axes) {
  if (axes == all_axes(axes.size())) return v;
  return op("permute", {v}, {{"axes", std::move(axes)}});
}

ValueId Builder::transpose(ValueId v) {
  Ints axes = all_axes(rank(v));
  std::swap(axes[axes.size() - 1], axes[axes.size() - 2]);
  return permute(v, std::move(axes));
}

ValueId Builder::expand(ValueId v, Dims wanted) {
  if (dims(v) == wanted) return v;
  return op("expand", {v}, {{"shape", std::move(wanted)}});
}

ValueId Builder::slice(ValueId v, size_t axis, int64_t start, int64_t stop, int64_t step) {
  if (start == 0 && stop == size(v, axis) && step == 1) return v;
  return op("slice", {v},
            {{"axis", static_cast<int64_t>(axis)},
             {"start", Dims{Dim(start)}},
             {"stop", Dims{Dim(stop)}},
             {"step", step}});
}

ValueId Builder::frame(ValueId v, size_t axis, int64_t before, int64_t after, double fill) {
  v = slice(v, axis, std::max<int64_t>(0, -before),
            size(v, axis) - std::max<int64_t>(0, -after));
  std::vector<ValueId> parts;
  auto add = [&](int64_t count) {
    if (count <= 0) return;
    ir::TensorType rows = type(v);
    rows.dims[axis] = Dim(count);
    parts.push_back(full(std::move(rows), fill));
  };
  add(before);
  parts.push_back(v);
  add(after);
  if (parts.size() == 1) return v;
  return op("concat", std::move(parts), {{"axis", static_cast<int64_t>(axis)}});
}

ValueId Builder::spread(ValueId v, size_t axis, int64_t step) {
  if (step == 1) return v;
  Dims flat = dims(v), wide = flat;
  wide.insert(wide.begin() + static_cast<std::ptrdiff_t>(axis) + 1, Dim(1));
  ValueId both = frame(reshape(v, std::move(wide)), axis + 1, 0, step - 1);
  flat[axis] = Dim(flat[axis].value() * step);
  return reshape(both, std::move(flat));
}

ValueId Builder::reduce(std::string kind, ValueId v, Ints axes, bool keepdim) {
  return op("reduce", {v},
            {{"kind", std::move(kind)},
             {"axes", std::move(axes)},
             {"keepdim", static_cast<int64_t>(keepdim)}});
}

ValueId Builder::sum_to(ValueId v, const Dims& wanted) {
  if (dims(v) == wanted) return v;
  const size_t extra = rank(v) - wanted.size();
  Ints axes;
  for (size_t i = 0; i < rank(v); ++i) {
    if (i < extra || (wanted[i - extra] == Dim(1) && dims(v)[i] != Dim(1))) {
      axes.push_back(static_cast<int64_t>(i));
    }
  }
  return reshape(axes.empty() ? v : reduce("sum", v, std::move(axes), true), wanted);
}

}  // namespace rm::autograd
