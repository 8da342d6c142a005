// One rule an operator (or a family of them): views become layouts, the rest become steps.
#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "base/error.hpp"
#include "ops/ewise_opcodes.hpp"
#include "ops/registry.hpp"
#include "plan/lowering.hpp"

namespace rm::plan {
namespace {

using ir::Ints;
using ir::Node;

// ---- views ----------------------------------------------------------------------------------

void reshape(Lowering& l, const Node& n) {
  l.define(n.result(), l.reshaped(l.ref(n.operands[0]), l.dims(n.result())));
}
void permute(Lowering& l, const Node& n) {
  Ref r = l.ref(n.operands[0]);
  r.layout = ir::view_permute(r.layout, n.ints("axes"));
  l.define(n.result(), r);
}
void expand(Lowering& l, const Node& n) {
  l.define(n.result(), l.broadcast(n.operands[0], l.dims(n.result())));
}
void bitcast(Lowering& l, const Node& n) {
  Ref r = l.ref(n.operands[0]);
  r.layout.dtype = l.dtype(n.result());
  l.define(n.result(), r);
}
void slice(Lowering& l, const Node& n) {
  Ref r = l.ref(n.operands[0]);
  r.layout = ir::view_slice(r.layout, static_cast<size_t>(n.i("axis")), n.dims("start")[0].value(),
                            n.dims("stop")[0].value(), n.i("step"));
  l.define(n.result(), r);
}
void concat(Lowering& l, const Node& n) {
  std::vector<Ref> parts;
  for (ir::ValueId v : n.operands) parts.push_back(l.ref(v));
  const bool images = std::all_of(parts.begin(), parts.end(), [](const Ref& part) {
    return has_channels_last(part.layout) && !part.layout.is_contiguous();
  });
  Ref out = images ? l.images(l.dtype(n.result()), l.dims(n.result())) : l.temporary_for(n.result());
  auto axis = static_cast<size_t>(n.i("axis"));
  int64_t at = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    int64_t size = parts[i].layout.dims[axis];
    const Ref slot = out.with(ir::view_slice(out.layout, axis, at, at + size, 1));
    if (!l.compute_within(n, i, slot)) l.emit("copy", {}, {parts[i]}, {slot});
    at += size;
  }
  l.define(n.result(), out);
}

// ---- elementwise ----------------------------------------------------------------------------

void pointwise(Lowering& l, const Node& n, int64_t opcode, ops::EwiseClass compute) {
  std::vector<Ref> inputs;
  for (ir::ValueId v : n.operands) inputs.push_back(l.broadcast(v, l.dims(n.result())));
  Ref out = l.like(n.result(), inputs);
  Ints code{opcode, static_cast<int64_t>(compute), -1, -1, -1};
  for (size_t i = 0; i < inputs.size(); ++i) code[2 + i] = static_cast<int64_t>(i);
  l.emit("ewise", {{"code", code}, {"imm", std::vector<double>{}}}, std::move(inputs), {out});
  l.define(n.result(), out);
}
void elementwise(Lowering& l, const Node& n) {
  int64_t opcode = ops::find_opcode(n.op)->opcode;
  // Comparisons compute in the class of what they compare; `where` in that of what it chooses.
  pointwise(l, n, opcode, ops::ewise_class(l.dtype(n.operands[opcode == ewise::kWhere ? 1 : 0])));
}
void cast(Lowering& l, const Node& n) {
  ops::EwiseClass from = ops::ewise_class(l.dtype(n.operands[0]));
  ops::EwiseClass to = ops::ewise_class(l.dtype(n.result()));
  // Integers convert straight into a float class; floats are rounded or truncated on the store.
  pointwise(l, n, ewise::kCopy, from == ops::EwiseClass::kInt ? to : from);
}
void ewise(Lowering& l, const Node& n) {
  std::vector<Ref> inputs;
  for (ir::ValueId v : n.operands) inputs.push_back(l.broadcast(v, l.dims(n.result())));
  Ref out = l.like(n.result(), inputs);
  l.emit("ewise", n.attrs, std::move(inputs), {out});
  l.define(n.result(), out);
}

// ---- matrix products -------------------------------------------------------------------------

void linear(Lowering& l, const Node& n) {
  Ref out = l.rows_for(n.result());
  Ref bias = n.operands.size() > 2 ? l.ref(n.operands[2]) : Ref{};
  l.emit("gemm", {{"trans_b", int64_t{1}}, {"activation", std::string("none")}, {"alpha", 1.0}},
         {l.ref(n.operands[0]), l.ref(n.operands[1]), bias, Ref{}}, {out});
  l.define(n.result(), out);
}
void gemm(Lowering& l, const Node& n) {
  Ref out = l.rows_for(n.result());
  auto operand = [&](size_t i) { return i < n.operands.size() ? l.ref(n.operands[i]) : Ref{}; };
  ir::Attrs attrs = n.attrs;
  attrs.emplace("trans_b", int64_t{1});
  attrs.emplace("activation", std::string("none"));
  attrs.emplace("alpha", 1.0);
  l.emit("gemm", std::move(attrs), {operand(0), operand(1), operand(2), operand(3)}, {out});
  l.define(n.result(), out);
}
void quant_linear(Lowering& l, const Node& n) {
  Ref out = l.temporary_for(n.result());
  std::vector<Ref> inputs;
  for (size_t i = 0; i < 6; ++i) {
    const bool present = i < n.operands.size() && n.operands[i] != ir::kNoValue;
    inputs.push_back(present ? l.ref(n.operands[i]) : Ref{});
  }
  l.emit("quant_linear", n.attrs, std::move(inputs), {out});
  l.define(n.result(), out);
}
// A matrix whose rows or columns repeat one element, as a gradient that is one number has it: kernels
// of products read no such.
Ref spread_matrix(Lowering& l, const Ref& r) {
  const size_t rank = r.layout.dims.size();
  for (size_t d = rank < 2 ? 0 : rank - 2; d < rank; ++d) {
    if (r.layout.dims[d] > 1 && r.layout.strides[d] == 0) return l.make_contiguous(r);
  }
  return r;
}

void matmul(Lowering& l, const Node& n) {
  Ref out = l.rows_for(n.result());
  Ref a = spread_matrix(l, l.ref(n.operands[0])), b = spread_matrix(l, l.ref(n.operands[1]));
  auto lead = [&](const Ref& r) {
    Ints dims(out.layout.dims.begin(), out.layout.dims.end() - 2);
    dims.insert(dims.end(), r.layout.dims.end() - 2, r.layout.dims.end());
    return dims;
  };
  a.layout = ir::view_expand(a.layout, lead(a));
  if (b.layout.dims.size() > 2) b.layout = ir::view_expand(b.layout, lead(b));
  l.emit("gemm", {{"trans_b", int64_t{0}}, {"activation", std::string("none")}, {"alpha", 1.0}},
         {a, b, Ref{}, Ref{}}, {out});
  l.define(n.result(), out);
}

void grouped_gemm(Lowering& l, const Node& n) {
  Ref out = l.temporary_for(n.result());
  l.emit("grouped_gemm", {},
         {spread_matrix(l, l.ref(n.operands[0])), spread_matrix(l, l.ref(n.operands[1])), l.ref(n.operands[2])},
         {out});
  l.define(n.result(), out);
}

// ---- norms, attention, lookups ----------------------------------------------------------------

void layer_norm(Lowering& l, const Node& n) {
  Ints full = l.dims(n.result());
  auto axes = static_cast<size_t>(n.i_or("num_axes", 1));
  int64_t inner = 1;
  for (size_t i = full.size() - axes; i < full.size(); ++i) inner *= full[i];
  Ints flat(full.begin(), full.end() - static_cast<std::ptrdiff_t>(axes));
  flat.push_back(inner);
  auto operand = [&](size_t i, const Ints& dims) {
    if (i >= n.operands.size() || n.operands[i] == ir::kNoValue) return Ref{};
    Ref r = l.ref(n.operands[i]);
    return r.layout.dims == dims ? r : l.reshaped(r, dims);
  };
  std::vector<Ref> outputs;
  for (ir::ValueId v : n.results) {
    Ref out = l.temporary_for(v);
    l.define(v, out);
    outputs.push_back(axes == 1 ? out : l.reshaped(out, flat));
  }
  std::vector<Ref> inputs{operand(0, flat), operand(1, {inner})};
  size_t residual = 2;
  if (n.op == "layer_norm") inputs.push_back(operand(residual++, {inner}));
  inputs.push_back(operand(residual, flat));
  ir::Attrs attrs = n.attrs;
  attrs.erase("num_axes");
  if (n.op == "rms_norm") attrs.emplace("weight_offset", 0.0);
  l.emit(n.op, std::move(attrs), std::move(inputs), std::move(outputs));
}

// [B,H,S,D], written as [B,S,H,D] in memory: the transpose that models do afterwards is then a view.
Ref rows_of_heads(Lowering& l, ir::ValueId v) {
  const Ints d = l.dims(v);
  Ref memory = l.temporary(l.dtype(v), {d[0], d[2], d[1], d[3]});
  return memory.with(ir::view_permute(memory.layout, {0, 2, 1, 3}));
}

void sdpa(Lowering& l, const Node& n) {
  Ints q = l.dims(n.operands[0]), k = l.dims(n.operands[1]);
  std::vector<Ref> inputs{l.ref(n.operands[0]), l.ref(n.operands[1]), l.ref(n.operands[2])};
  Ref mask;
  if (n.operands.size() > 3 && n.operands[3] != ir::kNoValue) {
    mask = l.broadcast(n.operands[3], {q[0], q[1], q[2], k[2]});
  }
  inputs.push_back(mask);
  if (n.operands.size() > 4 && n.operands[4] != ir::kNoValue) inputs.push_back(l.ref(n.operands[4]));
  std::vector<Ref> outputs{rows_of_heads(l, n.result())};
  l.define(n.result(), outputs[0]);
  if (n.results.size() > 1) {
    outputs.push_back(l.temporary_for(n.results[1]));
    l.define(n.results[1], outputs[1]);
  }
  l.emit("sdpa", n.attrs, std::move(inputs), std::move(outputs));
}

// Head by head they are what the projections' gradients read as rows.
void sdpa_backward(Lowering& l, const Node& n) {
  const Ints q = l.dims(n.operands[0]), k = l.dims(n.operands[1]);
  std::vector<Ref> inputs, outputs;
  for (size_t i = 0; i < n.operands.size(); ++i) {
    const ir::ValueId v = n.operands[i];
    const bool mask = i == 3 && v != ir::kNoValue;
    Ref r = v == ir::kNoValue ? Ref{} : mask ? l.broadcast(v, {q[0], q[1], q[2], k[2]}) : l.ref(v);
    // Kernels read rows: a gradient that is one number everywhere has none.
    const bool rows = i != 3 && r.present() && r.layout.dims.size() == 4;
    if (rows && r.layout.dims[3] > 1 && r.layout.strides[3] != 1) r = l.make_contiguous(r);
    inputs.push_back(std::move(r));
  }
  for (ir::ValueId v : n.results) {
    outputs.push_back(rows_of_heads(l, v));
    l.define(v, outputs.back());
  }
  l.emit("sdpa_backward", n.attrs, std::move(inputs), std::move(outputs));
}

// The rows' leading axes have to be of one pitch.
void norm_backward(Lowering& l, const Node& n) {
  std::vector<Ref> inputs, outputs;
  for (size_t i = 0; i < 4; ++i) {
    const bool given = i < n.operands.size() && n.operands[i] != ir::kNoValue;
    inputs.push_back(given ? l.make_contiguous(l.ref(n.operands[i])) : Ref{});
  }
  for (ir::ValueId v : n.results) {
    outputs.push_back(l.temporary_for(v));
    l.define(v, outputs.back());
  }
  l.emit(n.op, n.attrs, std::move(inputs), std::move(outputs));
}

void rope(Lowering& l, const Node& n) {
  Ref out = l.temporary_for(n.result());
  l.emit("rope", n.attrs,
         {l.ref(n.operands[0]), l.broadcast(n.operands[1], out.layout.dims),
          l.broadcast(n.operands[2], out.layout.dims)},
         {out});
  l.define(n.result(), out);
}

// Its result is a factor of two products.
void cross_entropy_backward(Lowering& l, const Node& n) {
  std::vector<Ref> inputs;
  for (ir::ValueId v : n.operands) inputs.push_back(l.ref(v));
  for (size_t i = 1; i < inputs.size(); ++i) inputs[i] = l.make_contiguous(inputs[i]);
  Ref out = l.aligned_rows(l.dtype(n.result()), l.dims(n.result()));
  l.define(n.result(), out);
  l.emit(n.op, n.attrs, std::move(inputs), {out});
}

// Targets that are repeated, or a column of others, lie in rows of their own for the kernels.
void cross_entropy(Lowering& l, const Node& n) {
  std::vector<Ref> outputs;
  for (ir::ValueId v : n.results) {
    outputs.push_back(l.temporary_for(v));
    l.define(v, outputs.back());
  }
  l.emit(n.op, n.attrs, {l.ref(n.operands[0]), l.make_contiguous(l.ref(n.operands[1]))},
         std::move(outputs));
}

void softmax(Lowering& l, const Node& n) {
  Ref in = l.ref(n.operands[0]), out = l.temporary_for(n.result());
  l.define(n.result(), out);
  auto rank = static_cast<int64_t>(in.layout.dims.size());
  Ints axes(static_cast<size_t>(rank));
  std::iota(axes.begin(), axes.end(), 0);
  std::swap(axes[static_cast<size_t>(n.i_or("axis", rank - 1))], axes.back());
  in.layout = ir::view_permute(in.layout, axes);
  out.layout = ir::view_permute(out.layout, axes);
  l.emit("softmax", {{"log", n.i_or("log", 0)}}, {in}, {out});
}

void reduce(Lowering& l, const Node& n) {
  Ref in = l.ref(n.operands[0]), out = l.temporary_for(n.result());
  l.define(n.result(), out);
  Ints kept = in.layout.dims;
  for (int64_t a : n.ints("axes")) kept[static_cast<size_t>(a)] = 1;
  l.emit("reduce", {{"kind", n.s("kind")}, {"axes", n.ints("axes")}}, {in},
         {l.reshaped(out, kept)});
}

// Operands and results as they are: the contract is the same on both levels.
void direct(Lowering& l, const Node& n) {
  std::vector<Ref> inputs, outputs;
  for (ir::ValueId v : n.operands) inputs.push_back(l.ref(v));
  for (ir::ValueId v : n.results) {
    outputs.push_back(l.temporary_for(v));
    l.define(v, outputs.back());
  }
  l.emit(n.op, n.attrs, std::move(inputs), std::move(outputs));
}

void index(Lowering& l, const Node& n) {
  Ref out = l.temporary_for(n.result());
  Ints shape;  // of the index operands, broadcast together
  for (size_t i = 1; i < n.operands.size(); ++i) {
    Ints d = l.dims(n.operands[i]);
    if (d.size() > shape.size()) shape.insert(shape.begin(), d.size() - shape.size(), 1);
    for (size_t k = 0; k < d.size(); ++k) {
      int64_t& s = shape[shape.size() - d.size() + k];
      s = s == 1 ? d[k] : s;
    }
  }
  std::vector<Ref> inputs{l.ref(n.operands[0])};
  for (size_t i = 1; i < n.operands.size(); ++i) {
    inputs.push_back(l.broadcast(n.operands[i], shape));
  }
  l.emit("index", n.attrs, std::move(inputs), {out});
  l.define(n.result(), out);
}

// The operand that the record says is updated becomes the output; kernels get the others.
void in_place(Lowering& l, const Node& n) {
  const auto target = static_cast<size_t>(ops::get(n.op).updates);
  Ref out = l.updated(n, target);
  std::vector<Ref> inputs;
  for (size_t i = 0; i < n.operands.size(); ++i) {
    if (i != target) inputs.push_back(l.ref(n.operands[i]));
  }
  l.define(n.result(), out);
  l.emit(n.op, n.attrs, std::move(inputs), {out}, true);
}

void assign(Lowering& l, const Node& n) { l.assign(n); }

void check(Lowering& l, const Node& n) { l.check(n); }

const std::unordered_map<std::string_view, LowerRule>& rules() {
  static const std::unordered_map<std::string_view, LowerRule> table{
      {"reshape", reshape},   {"permute", permute},       {"expand", expand},
      {"slice", slice},       {"concat", concat},         {"cast", cast},
      {"bitcast", bitcast},
      {"ewise", ewise},       {"linear", linear},         {"gemm", gemm},
      {"matmul", matmul},     {"grouped_gemm", grouped_gemm}, {"layer_norm", layer_norm}, {"rms_norm", layer_norm},
      {"sdpa", sdpa},         {"sdpa_backward", sdpa_backward},
      {"rope", rope},         {"softmax", softmax},
      {"cross_entropy", cross_entropy},
      {"cross_entropy_backward", cross_entropy_backward},
      {"layer_norm_backward", norm_backward}, {"rms_norm_backward", norm_backward},
      {"reduce", reduce},     {"embedding", direct},      {"gather", direct},
      {"scatter", direct},    {"cumsum", direct},         {"sort", direct},
      {"scan", direct},
      {"uniform", direct},
      {"quantize", direct},   {"quant_linear", quant_linear},
      {"index", index},       {"index_copy", in_place},
      {"conv", lower_conv},   {"pool", lower_images},
      {"resize", lower_images}, {"group_norm", lower_images},
      {"assign", assign},     {"recurrent", direct},
      {"adam", direct},         {"check", check},
  };
  return table;
}

}  // namespace

LowerRule find_rule(std::string_view op) {
  auto it = rules().find(op);
  if (it != rules().end()) return it->second;
  if (ops::find_opcode(op) != nullptr) return elementwise;
  const ops::OpDef* def = ops::find(op);
  return def != nullptr && def->is(ops::kOpaque) ? direct : nullptr;
}

}  // namespace rm::plan
