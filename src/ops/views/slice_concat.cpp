// slice and concat along one axis.
#include "ops/infer.hpp"

namespace rm::ops {
namespace {

using ir::Dim;
using ir::Graph;
using ir::Node;
using ir::TensorType;
using Types = std::vector<TensorType>;

const Dim& bound(const Node& node, const char* name) {
  const ir::Dims& dims = node.dims(name);
  if (dims.size() != 1) fail(node, std::string(name) + " of one dim", dims_text(dims));
  return dims[0];
}

void check_bounds(const Node& node, const Dim& start, const Dim& stop, const Dim& size) {
  auto below = [](const Dim& a, const Dim& b) {
    Dim gap = b - a;
    return !gap.is_static() || gap.value() >= 0;
  };
  if (!below(0, start) || !below(start, stop) || !below(stop, size)) {
    fail(node, "0 <= start <= stop <= " + size.str(), start.str() + " and " + stop.str());
  }
}

Types infer_slice(const Graph& graph, const Node& node) {
  TensorType out = operand_type(graph, node, 0);
  size_t axis = axis_of(node, out.rank());
  int64_t step = node.i_or("step", 1);
  if (step <= 0) fail(node, "step > 0", std::to_string(step));
  const Dim &start = bound(node, "start"), &stop = bound(node, "stop");
  check_bounds(node, start, stop, out.dims[axis]);
  out.dims[axis] = step == 1 ? stop - start : Dim::floordiv(stop - start + (step - 1), step);
  return {out};
}

std::vector<HostTensor> reference_slice(const Node& node, const HostOperands& in,
                                        const Types& out) {
  size_t axis = axis_of(node, in[0]->type.rank());
  std::vector<int64_t> strides = contiguous_strides(sizes(in[0]->type.dims));
  int64_t base = bound(node, "start").value() * strides[axis];
  strides[axis] *= node.i_or("step", 1);
  return {take(*in[0], out[0], strided_offsets(sizes(out[0].dims), strides, base))};
}

Types infer_concat(const Graph& graph, const Node& node) {
  TensorType out = operand_type(graph, node, 0);
  size_t axis = axis_of(node, out.rank());
  for (size_t i = 1; i < node.operands.size(); ++i) {
    const TensorType& x = operand_type(graph, node, i);
    check_dtype(node, x, out.dtype, "operands");
    check_rank(node, x, out.rank(), "operands");
    for (size_t d = 0; d < out.rank(); ++d) {
      out.dims[d] = d == axis ? out.dims[d] + x.dims[d]
                              : unify(node, out.dims[d], x.dims[d], "sizes outside the axis");
    }
  }
  return {out};
}

std::vector<HostTensor> reference_concat(const Node& node, const HostOperands& in,
                                         const Types& out) {
  HostTensor y = zeros(out[0]);
  size_t axis = axis_of(node, out[0].rank());
  AxisSplit whole = split_at(out[0].dims, axis);
  int64_t done = 0;
  for (const HostTensor* x : in) {
    AxisSplit part = split_at(x->type.dims, axis);
    size_t run = static_cast<size_t>(part.size * part.inner) * ir::size_bytes(out[0].dtype);
    for (int64_t o = 0; o < part.outer; ++o) {
      y.bytes.replace(static_cast<size_t>(y.at((o * whole.size + done) * whole.inner) - y.at(0)),
                      run, x->bytes, static_cast<size_t>(o) * run, run);
    }
    done += part.size;
  }
  return {y};
}

}  // namespace

extern const OpDef kSlice{"slice", 1, 1, kView, infer_slice, view_cost, reference_slice};
extern const OpDef kConcat{"concat",     1,         kAnyNumber,      kNone,
                           infer_concat, copy_cost, reference_concat};

}  // namespace rm::ops
