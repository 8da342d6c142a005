// The driver of lowering: buffers, views, outputs. The operator rules are in lower_rules.cpp.
#include "plan/lower.hpp"

#include <algorithm>
#include <map>
#include <optional>

#include "base/error.hpp"
#include "plan/lowering.hpp"

namespace rm::plan {

namespace {

// True when the view visits every element of a buffer of `bytes` exactly once, in any order.
bool covers_once(const ir::Layout& layout, int64_t bytes) {
  if (layout.offset != 0 || layout.is_empty() || layout.num_bytes() != bytes) return false;
  std::vector<std::pair<int64_t, int64_t>> axes;  // (stride, dim)
  for (size_t i = 0; i < layout.dims.size(); ++i) {
    if (layout.dims[i] != 1) axes.emplace_back(layout.strides[i], layout.dims[i]);
  }
  std::sort(axes.begin(), axes.end());
  int64_t dense = 1;
  for (auto [stride, dim] : axes) {
    if (stride != dense) return false;
    dense *= dim;
  }
  return true;
}

}  // namespace

Lowering::Lowering(const LowerRequest& request)
    : request_(request), refs_(request.graph->num_values()) {
  for (size_t n = 0; n < request.nodes.size(); ++n) {
    const ir::Node& node = graph().nodes[static_cast<size_t>(request.nodes[n])];
    if (ir::is_kept(node)) nodes_checked_ = n + 1;
  }
}

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
  external_of_.push_back(e);
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
  external_of_.push_back(nullptr);
  return {static_cast<int32_t>(list_.buffers.size() - 1), std::move(layout)};
}

Ref Lowering::aligned_rows(ir::DType dtype, const ir::Ints& dims) {
  const auto unit = std::max<int64_t>(1, 16 / static_cast<int64_t>(ir::size_bytes(dtype)));
  if (dims.size() != 2 || dims[0] <= 1 || dims[1] % unit == 0) return temporary(dtype, dims);
  const Ref memory = temporary(dtype, {dims[0], (dims[1] + unit - 1) / unit * unit});
  return memory.with(ir::view_slice(memory.layout, 1, 0, dims[1], 1));
}

Ref Lowering::rows_for(ir::ValueId v) {
  const std::vector<ir::Node>& nodes = graph().nodes;
  const bool classes = std::any_of(nodes.begin(), nodes.end(), [&](const ir::Node& n) {
    return n.op == "cross_entropy" && n.operands[0] == v;
  });
  return classes ? aligned_rows(dtype(v), dims(v)) : temporary_for(v);
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
  return source.with(*view);
}

void Lowering::emit(std::string op, ir::Attrs attrs, std::vector<Ref> inputs,
                    std::vector<Ref> outputs, bool updates) {
  bool empty = true;
  for (const auto& o : outputs) empty = empty && (!o.present() || o.layout.is_empty());
  if (empty) return;  // nothing to write
  list_.steps.push_back(
      {std::move(op), std::move(attrs), std::move(inputs), std::move(outputs), updates});
}

// Values that are views of one buffer form one alias class: a read of any of them counts. Nodes
// before the current one have read what they need, and views are made by nodes that count as readers.
bool Lowering::read_elsewhere(int32_t buffer, const ir::Node& current, size_t operand) const {
  auto aliases = [&](ir::ValueId v) {
    return v != ir::kNoValue && refs_[static_cast<size_t>(v)].buffer == buffer;
  };
  for (size_t i = 0; i < current.operands.size(); ++i) {
    if (i != operand && aliases(current.operands[i])) return true;
  }
  for (size_t n = current_ + 1; n < request_.nodes.size(); ++n) {
    const ir::Node& node = graph().nodes[static_cast<size_t>(request_.nodes[n])];
    if (std::any_of(node.operands.begin(), node.operands.end(), aliases)) return true;
  }
  return std::any_of(request_.results.begin(), request_.results.end(), aliases);
}

Ref Lowering::updated(const ir::Node& node, size_t operand) {
  Ref r = ref(node.operands[operand]);
  const Buffer& b = list_.buffers[static_cast<size_t>(r.buffer)];
  const bool ours = b.kind == BufferKind::kTemp || (b.donated && current_ >= nodes_checked_);
  if (!ours || !covers_once(r.layout, b.bytes) || read_elsewhere(r.buffer, node, operand)) {
    Ref copy = temporary_for(node.operands[operand]);
    emit("copy", {}, {r}, {copy});
    r = copy;
  }
  ++r.version;
  return r;
}

// Makes the step that computes `value` write `state`: one that works element by element and is the
// only writer of a buffer of its own, from which on nobody reads what the state held.
bool Lowering::compute_into(const Ref& value, const Ref& state, const ir::Node& node) {
  const Buffer& temp = list_.buffers[static_cast<size_t>(value.buffer)];
  const Buffer& memory = list_.buffers[static_cast<size_t>(state.buffer)];
  if (temp.kind != BufferKind::kTemp || value.version != 0 || !memory.donated) return false;
  if (value.layout != state.layout || !value.layout.is_contiguous() || value.layout.offset != 0 ||
      value.layout.num_bytes() != temp.bytes || value.layout.num_bytes() != memory.bytes) {
    return false;
  }
  auto touches = [](const std::vector<Ref>& refs, int32_t buffer) {
    return std::any_of(refs.begin(), refs.end(), [&](const Ref& r) { return r.buffer == buffer; });
  };
  size_t maker = list_.steps.size();
  for (size_t s = 0; s < list_.steps.size(); ++s) {
    if (!touches(list_.steps[s].outputs, value.buffer)) continue;
    if (maker != list_.steps.size()) return false;  // written in parts
    maker = s;
  }
  if (maker == list_.steps.size() || maker < steps_checked_ || current_ < nodes_checked_) return false;
  const Step& step = list_.steps[maker];
  if (step.op != "adam" && (step.op != "ewise" || step.updates || step.outputs.size() != 1)) return false;
  for (const Ref& in : step.inputs) {
    if (in.buffer == state.buffer && in.layout != state.layout) return false;
  }
  for (size_t s = maker + 1; s < list_.steps.size(); ++s) {
    if (touches(list_.steps[s].inputs, state.buffer)) return false;
  }
  if (read_elsewhere(state.buffer, node, 0)) return false;

  const int32_t from = value.buffer, version = state.version + 1;
  auto move = [&](Ref& r) {
    if (r.buffer == from) r.buffer = state.buffer, r.version = version;
  };
  for (size_t s = maker; s < list_.steps.size(); ++s) {
    for (Ref& r : list_.steps[s].inputs) move(r);
    for (Ref& r : list_.steps[s].outputs) move(r);
  }
  for (Ref& r : refs_) move(r);
  list_.steps[maker].updates = list_.steps[maker].in_place = true;
  return true;
}

namespace {

// `layout`, over rows of `n` elements that follow each other, over rows of a pitch from `offset` on.
// None where an axis is neither within a row nor one of whole rows.
std::optional<ir::Layout> over_rows(ir::Layout layout, int64_t n, int64_t pitch, int64_t offset) {
  int64_t within = 0;  // the last element of a row that is met
  for (size_t d = 0; d < layout.dims.size(); ++d) {
    if (layout.dims[d] == 1) continue;
    if (layout.strides[d] % n == 0) {
      layout.strides[d] = layout.strides[d] / n * pitch;
    } else {
      within += (layout.dims[d] - 1) * layout.strides[d];
    }
  }
  if (within >= n || layout.offset != 0) return std::nullopt;
  layout.offset = offset;
  return layout;
}

}  // namespace

bool Lowering::compute_within(const ir::Node& node, size_t operand, const Ref& slot) {
  const Ref part = ref(node.operands[operand]);
  const ir::Layout &from = part.layout, &to = slot.layout;
  const Buffer& temp = list_.buffers[static_cast<size_t>(part.buffer)];
  const size_t rank = from.dims.size();
  if (temp.kind != BufferKind::kTemp || part.version != 0 || rank < 2 || from.offset != 0 ||
      !from.is_contiguous() || from.num_bytes() != temp.bytes || from.is_empty() ||
      read_elsewhere(part.buffer, node, operand)) {
    return false;
  }
  const int64_t n = from.dims[rank - 1], pitch = to.strides[rank - 2];
  for (size_t d = 0; d + 1 < rank; ++d) {  // rows of one pitch
    if (from.dims[d] != 1 && to.strides[d] != from.strides[d] / n * pitch) return false;
  }
  Ref* made = nullptr;
  for (Step& step : list_.steps) {
    for (const Ref& in : step.inputs) {
      if (in.buffer == part.buffer) return false;
    }
    for (Ref& out : step.outputs) {
      if (out.buffer != part.buffer) continue;
      if (made != nullptr || step.op != "sdpa_backward" || step.updates) return false;
      made = &out;
    }
  }
  if (made == nullptr || to.strides[rank - 1] != 1) return false;
  const std::optional<ir::Layout> layout = over_rows(made->layout, n, pitch, to.offset);
  if (!layout) return false;
  *made = slot.with(*layout);
  return true;
}

void Lowering::assign(const ir::Node& node) {
  const Ref state = ref(node.operands[0]), value = ref(node.operands[1]);
  define(node.result(), value);  // moves with the value
  if (state.layout.is_empty() || compute_into(value, state, node)) return;
  if (list_.buffers[static_cast<size_t>(state.buffer)].donated) {
    late_.push_back({node.result(), state, value});
  }
}

void Lowering::check(const ir::Node& node) {
  const Ref out = temporary_for(node.result());
  define(node.result(), out);
  emit("check", node.attrs, {ref(node.operands[0])}, {out});
  steps_checked_ = list_.steps.size();
}

// A value that is another state's memory has to be saved before any state is written, and so has a
// result that is a view of what a state held.
void Lowering::assign_late() {
  for (Late& late : late_) {
    late.value = ref(late.result);
    if (list_.buffers[static_cast<size_t>(late.value.buffer)].kind != BufferKind::kInput) continue;
    Ref saved = temporary(late.value.layout.dtype, late.value.layout.dims);
    emit("copy", {}, {late.value}, {saved});
    late.value = saved;
  }
  for (ir::ValueId result : request_.results) {
    const Ref held = ref(result);
    const bool written = std::any_of(late_.begin(), late_.end(), [&](const Late& late) {
      return late.state.buffer == held.buffer;
    });
    if (!written || held.layout.is_empty()) continue;
    Ref saved = temporary(held.layout.dtype, held.layout.dims);
    emit("copy", {}, {held}, {saved});
    define(result, saved);
  }
  for (const Late& late : late_) {
    Ref written = late.state;
    ++written.version;
    emit("copy", {}, {late.value}, {written}, true);
    define(late.result, written);
  }
}

// Axes along which result `result` repeats its elements, and may, become axes of one element.
bool Lowering::collapse_repeated(size_t result, ir::Layout& layout) const {
  if (result >= request_.repeated.size() || layout.is_empty()) return false;
  bool any = false;
  for (int64_t axis : request_.repeated[result]) {
    const auto a = static_cast<size_t>(axis);
    if (a >= layout.dims.size() || layout.strides[a] != 0 || layout.dims[a] == 1) continue;
    layout.dims[a] = 1;
    any = true;
  }
  return any;
}

// True when the view is the donated input as the caller laid it out, so that the caller's own tensor
// is the result. A permuted view of it, say, has to be copied.
bool Lowering::is_whole_input(const Ref& r) const {
  const External* e = external_of_[static_cast<size_t>(r.buffer)];
  return e != nullptr && e->kind == BufferKind::kInput && r.layout == e->layout;
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
    if (b.donated && claims[r.buffer] == 1 && !repeats && !r.layout.is_empty() && is_whole_input(r)) {
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
  for (current_ = 0; current_ < request_.nodes.size(); ++current_) {
    const ir::Node& node = graph().nodes[static_cast<size_t>(request_.nodes[current_])];
    LowerRule rule = find_rule(node.op);
    if (rule == nullptr) {
      throw Error(RM_UNIMPLEMENTED,
                  "[lower] expected an operator of docs/operators.md, got '" + node.op + "'",
                  "RM202");
    }
    rule(*this, node);
  }
  assign_late();
  claim_outputs();
  return std::move(list_);
}

StepList lower(const LowerRequest& request) { return Lowering(request).run(); }

}  // namespace rm::plan
