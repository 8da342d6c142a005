// Convolutions, pools and what stands between them. Images are computed with their channels last in
// memory ([N, H, W, C] seen as [N, C, H, W]): each kernel then reads and writes whole vectors of
// channels, and no step that changes a layout stands between two convolutions.
#include <algorithm>
#include <numeric>

#include "plan/lowering.hpp"

namespace rm::plan {

using ir::Ints;
using ir::Node;

namespace {

// 0, 2, 3, ..., 1: the axes as they lie in memory.
Ints memory_order(size_t rank) {
  Ints axes(rank);
  std::iota(axes.begin(), axes.end(), 0);
  std::rotate(axes.begin() + 1, axes.begin() + 2, axes.end());
  return axes;
}

Ref as_images(const Ref& memory) {
  Ints axes(memory.layout.dims.size());
  std::iota(axes.begin(), axes.end(), 0);
  std::rotate(axes.begin() + 1, axes.end() - 1, axes.end());
  return memory.with(ir::view_permute(memory.layout, axes));
}

Ref operand_or_none(Lowering& l, const Node& n, size_t i) {
  return i < n.operands.size() ? l.ref(n.operands[i]) : Ref{};
}

}  // namespace

bool has_channels_last(const ir::Layout& layout) {
  if (layout.dims.size() < 3) return false;
  return ir::view_permute(layout, memory_order(layout.dims.size())).is_contiguous();
}

Ref Lowering::images(ir::DType dtype, const Ints& dims) {
  Ints memory = dims;
  std::rotate(memory.begin() + 1, memory.begin() + 2, memory.end());
  return as_images(temporary(dtype, memory));
}

Ref Lowering::like(ir::ValueId v, const std::vector<Ref>& inputs) {
  const Ints shape = dims(v);
  const bool any = std::any_of(inputs.begin(), inputs.end(), [&](const Ref& r) {
    return r.present() && r.layout.dims == shape && !r.layout.is_contiguous() &&
           has_channels_last(r.layout);
  });
  return any ? images(dtype(v), shape) : temporary_for(v);
}

Ref Lowering::with_channels_last(const Ref& r) {
  if (!r.present() || has_channels_last(r.layout)) return r;
  Ref out = images(r.layout.dtype, r.layout.dims);
  emit("copy", {}, {r}, {out});
  return out;
}

void lower_conv(Lowering& l, const Node& n) {
  Ref x = l.with_channels_last(l.ref(n.operands[0]));
  Ref residual = l.with_channels_last(operand_or_none(l, n, 3));
  Ref out = l.images(l.dtype(n.result()), l.dims(n.result()));
  l.emit("conv", n.attrs, {x, l.ref(n.operands[1]), operand_or_none(l, n, 2), residual}, {out});
  l.define(n.result(), out);
}

// Layouts of operand and result are alike: channels last where the operand has them so.
void lower_images(Lowering& l, const Node& n) {
  Ref x = l.ref(n.operands[0]);
  const bool last = !x.layout.is_contiguous() && has_channels_last(x.layout);
  Ref out = last ? l.images(l.dtype(n.result()), l.dims(n.result())) : l.temporary_for(n.result());
  std::vector<Ref> inputs{x};
  for (size_t i = 1; i < n.operands.size(); ++i) inputs.push_back(operand_or_none(l, n, i));
  ir::Attrs attrs = n.attrs;
  attrs.erase("size");  // the result's shape says it
  l.emit(n.op, std::move(attrs), std::move(inputs), {out});
  l.define(n.result(), out);
}

}  // namespace rm::plan
