// The driver of lowering: buffers, views, outputs. The operator rules are in lower_rules.cpp.
#include "plan/lower.hpp"

#include <map>

#include "base/error.hpp"
#include "plan/lowering.hpp"

namespace rm::plan {

Lowering::Lowering(const LowerRequest& request)
    : request_(request), refs_(request.graph->num_values()), uses_(request.graph->use_counts()) {}

Ref Lowering::ref(ir::ValueId v) {
  if (v == ir::kNoValue) return {};
  Ref& r = refs_[static_cast<size_t>(v)];
  if (r.present()) return r;
  const External* e = static_cast<size_t>(v) < request_.externals.size()
                          ? request_.externals[static_cast<size_t>(v)]
                          : nullptr;
  if (e == nullptr) {
    throw Error(RM_INTERNAL, "[lower] expected %" + std::to_string(v) + " to be computed before use");
  }
  list_.buffers.push_back({e->kind, e->index, e->bytes, e->donated});
  r = {static_cast<int32_t>(list_.buffers.size() - 1), e->layout};
  return r;
}

Ref Lowering::broadcast(ir::ValueId v, const ir::Ints& dims) {
  Ref r = ref(v);
  if (r.present()) r.layout = ir::view_expand(r.layout, dims);
  return r;
}

Ref Lowering::temporary(ir::DType dtype, const ir::Ints& dims) {
  ir::Layout layout = ir::contiguous(dtype, dims);
  list_.buffers.push_back({BufferKind::kTemp, 0, layout.num_bytes()});
  return {static_cast<int32_t>(list_.buffers.size() - 1), std::move(layout)};
}

Ref Lowering::make_contiguous(const Ref& r) {
  if (!r.present() || r.layout.is_contiguous()) return r;
  Ref out = temporary(r.layout.dtype, r.layout.dims);
  emit("copy", {}, {r}, {out});
  return out;
}

Ref Lowering::reshaped(const Ref& r, const ir::Ints& dims) {
  auto view = ir::view_reshape(r.layout, dims);
  Ref source = view ? r : make_contiguous(r);
  if (!view) view = ir::view_reshape(source.layout, dims);
  return {source.buffer, *view};
}

void Lowering::emit(std::string op, ir::Attrs attrs, std::vector<Ref> inputs,
                    std::vector<Ref> outputs, bool updates) {
  bool empty = true;
  for (const auto& o : outputs) empty = empty && (!o.present() || o.layout.num_elements() == 0);
  if (empty) return;  // nothing to write
  list_.steps.push_back(
      {std::move(op), std::move(attrs), std::move(inputs), std::move(outputs), updates});
}

Ref Lowering::owned(ir::ValueId v) {
  Ref r = ref(v);
  const Buffer& b = list_.buffers[static_cast<size_t>(r.buffer)];
  bool whole = r.layout.offset == 0 && r.layout.num_bytes() == b.bytes;
  if (b.donated && whole && uses_[static_cast<size_t>(v)] == 1) return r;
  Ref out = temporary_for(v);
  emit("copy", {}, {r}, {out});
  return out;
}

// Axes along which result `result` repeats its elements, and may, become axes of one element.
bool Lowering::collapse_repeated(size_t result, ir::Layout& layout) const {
  if (result >= request_.repeated.size() || layout.num_elements() == 0) return false;
  bool any = false;
  for (int64_t axis : request_.repeated[result]) {
    const auto a = static_cast<size_t>(axis);
    if (a >= layout.dims.size() || layout.strides[a] != 0 || layout.dims[a] == 1) continue;
    layout.dims[a] = 1;
    any = true;
  }
  return any;
}

void Lowering::claim_outputs() {
  // A temporary that is exactly one output becomes that output's buffer; anything else is copied.
  std::map<int32_t, int> claims;
  for (ir::ValueId v : request_.results) ++claims[ref(v).buffer];
  for (size_t i = 0; i < request_.results.size(); ++i) {
    Ref r = ref(request_.results[i]);
    if (!request_.own_outputs) {
      list_.outputs.push_back(r);
      continue;
    }
    const ir::Ints full = r.layout.dims;
    const bool repeats = collapse_repeated(i, r.layout);
    Buffer& b = list_.buffers[static_cast<size_t>(r.buffer)];
    bool whole = b.kind == BufferKind::kTemp && claims[r.buffer] == 1 && r.layout.offset == 0 &&
                 r.layout.is_contiguous() && r.layout.num_bytes() == b.bytes;
    if (b.kind == BufferKind::kInput && b.donated && claims[r.buffer] == 1 && !repeats &&
        r.layout.offset == 0 && r.layout.num_bytes() == b.bytes) {
      list_.outputs.push_back(r);  // the caller's own memory, updated in place
      continue;
    }
    if (!whole) {
      Ref out = temporary(r.layout.dtype, r.layout.dims);
      emit("copy", {}, {r}, {out});
      r = out;
    }
    Buffer& claimed = list_.buffers[static_cast<size_t>(r.buffer)];
    claimed.kind = BufferKind::kOutput;
    claimed.index = static_cast<int32_t>(i);
    if (repeats) r.layout = ir::view_expand(r.layout, full);
    list_.outputs.push_back(r);
  }
}

StepList Lowering::run() {
  for (int32_t n : request_.nodes) {
    const ir::Node& node = graph().nodes[static_cast<size_t>(n)];
    LowerRule rule = find_rule(node.op);
    if (rule == nullptr) {
      throw Error(RM_UNIMPLEMENTED,
                  "[lower] expected an operator of docs/operators.md, got '" + node.op + "'",
                  "RM202");
    }
    rule(*this, node);
  }
  claim_outputs();
  return std::move(list_);
}

StepList lower(const LowerRequest& request) { return Lowering(request).run(); }

}  // namespace rm::plan
