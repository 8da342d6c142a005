// Patterns over steps. A step moves up or down the list only where nothing in between writes what it
// reads; what a kernel of the device does not do is left as it was.
#include <algorithm>
#include <array>
#include <optional>

#include "ops/ewise_opcodes.hpp"
#include "plan/fusion.hpp"

namespace rm::plan {
namespace {

constexpr size_t kMostWeights = 3;  // of `linears` and `quant_linears`
constexpr int64_t kMostRows = 8;

// ---- products -----------------------------------------------------------------------------------

/// A product of which several become one step: its operands behind x, and what that step is called.
struct Form {
  const char *op, *fused;
  size_t parts;           // of the weight: operands 1, 2, ..
  size_t bias, residual;  // operands
};
constexpr Form kGemm{"gemm", "linears", 1, 2, 3};
constexpr Form kQuantLinear{"quant_linear", "quant_linears", 2, 4, 5};
constexpr size_t kZeroPoints = 3;  // an operand of quant_linear

/// That of a step; none of other operators.
const Form* form_of(const Step& step) {
  for (const Form* form : {&kGemm, &kQuantLinear}) {
    if (step.op == form->op) return form;
  }
  return nullptr;
}

/// Whether a product's weight is [N, K]: the same in all products of a fused step.
bool has_rows(const Step& step) { return attr_int(step, "trans_b", 1) != 0; }

/// How a weight is quantised: the same, too.
constexpr const char* kGroupingNames[] = {"bits", "group", "pairs"};
std::array<int64_t, 3> grouping_of(const Step& step) {
  return {attr_int(step, "bits", 8), attr_int(step, "group", 32), attr_int(step, "pairs", 0)};
}

/// Of so few rows that reading the weight is what it costs.
bool is_row_product(const Fusion& f, const Step& step) {
  const Form* form = form_of(step);
  if (form == nullptr) return false;
  const bool fits = form == &kGemm
                        ? attr_float(step, "alpha", 1.0) == 1.0
                        : attr_int(step, "pairs", 0) != 0 && !present(step, kZeroPoints);
  const ir::Layout& y = step.outputs[0].layout;
  if (!fits || y.dims.empty() || y.is_empty() || y.num_elements() > kMostRows * y.dims.back()) return false;
  for (size_t i = 1; i <= form->parts; ++i) {
    if (!f.is_constant(step.inputs[i]) || step.inputs[i].layout.dims.size() != 2) return false;
  }
  return !present(step, form->bias) || f.is_constant(step.inputs[form->bias]);
}

struct Members {
  std::vector<size_t> products;
  std::optional<size_t> gate;  // the step that multiplies the results of two products
};

/// The multiplication act(x a) * (x b), of two products that nothing else reads.
std::optional<size_t> gate_of(const Fusion& f, size_t a, size_t b) {
  const Step &first = f.step(a), &second = f.step(b);
  const Form& form = *form_of(first);
  if (attr_text(second, "activation") != "none" ||
      first.inputs[1].layout.dims != second.inputs[1].layout.dims) {
    return {};
  }
  for (const Step* s : {&first, &second}) {
    if (present(*s, form.bias) || present(*s, form.residual) || !f.is_temporary(s->outputs[0]) ||
        f.reads(s->outputs[0]) != 1) {
      return {};
    }
  }
  const Ref &x = first.outputs[0], &y = second.outputs[0];
  for (size_t s = std::max(a, b) + 1; s < f.size(); ++s) {
    const Step& mul = f.step(s);
    if (f.gone(s) || mul.op != "ewise" || mul.inputs.size() != 2 || mul.updates) continue;
    const bool both = (same(mul.inputs[0], x) && same(mul.inputs[1], y)) ||
                      (same(mul.inputs[0], y) && same(mul.inputs[1], x));
    if (!both) continue;
    const auto& code = std::get<ir::Ints>(mul.attrs.at("code"));
    const bool times = code.size() == 5 && code[0] == ops::find_opcode("mul")->opcode &&
                       code[2] != code[3] && mul.outputs[0].layout == x.layout;
    return times ? std::optional<size_t>(s) : std::nullopt;
  }
  return {};
}

/// Products of the operand of step `s`, from there on, with weights of the same kind.
std::vector<size_t> products_of(const Fusion& f, size_t s) {
  std::vector<size_t> found;
  for (size_t t = s; t < f.size(); ++t) {
    if (f.gone(t) || !is_row_product(f, f.step(t))) continue;
    if (f.step(t).op != f.step(s).op || grouping_of(f.step(t)) != grouping_of(f.step(s))) continue;
    if (has_rows(f.step(t)) != has_rows(f.step(s))) continue;
    if (same(f.step(t).inputs[0], f.step(s).inputs[0]) && f.keeps(f.step(s).inputs[0], s, t)) {
      found.push_back(t);
    }
  }
  return found;
}

/// The candidates for one step, larger ones first.
std::vector<Members> groups_of(const Fusion& f, size_t s) {
  const std::vector<size_t> all = products_of(f, s);
  const size_t residual = form_of(f.step(s))->residual;
  std::vector<Members> out;
  for (size_t other : all) {
    if (other == s) continue;
    if (auto gate = gate_of(f, s, other)) out.push_back({{s, other}, gate});
    if (auto gate = gate_of(f, other, s)) out.push_back({{other, s}, gate});
  }
  std::vector<size_t> plain;
  for (size_t t : all) {
    if (attr_text(f.step(t), "activation") == "none" && !present(f.step(t), residual)) plain.push_back(t);
  }
  if (plain.size() > 1 && plain.size() <= kMostWeights && plain.front() == s) out.push_back({plain, {}});
  out.push_back({{s}, {}});
  return out;
}

/// The norm that makes x for these products alone.
std::optional<size_t> norm_of(const Fusion& f, const Members& members, size_t at) {
  const Ref& x = f.step(members.products[0]).inputs[0];
  const auto made = f.maker(x);
  if (!made || f.reads(x) != members.products.size()) return {};
  const Step& norm = f.step(*made);
  const bool centred = norm.op == "layer_norm";
  if ((!centred && norm.op != "rms_norm") || norm.outputs.size() != 1 || !present(norm, 1) ||
      present(norm, centred ? 3 : 2)) {
    return {};
  }
  if (!f.is_constant(norm.inputs[1]) || (centred && present(norm, 2) && !f.is_constant(norm.inputs[2])) || !x.layout.is_contiguous() || !norm.inputs[0].layout.is_contiguous() ||
      norm.inputs[0].layout.num_elements() != x.layout.num_elements()) {
    return {};
  }
  return f.keeps(norm.inputs[0], *made, at) ? made : std::nullopt;
}

Step linears(const Fusion& f, const Members& members, std::optional<size_t> norm) {
  const Step& first = f.step(members.products[0]);
  const Form& form = *form_of(first);
  Step out;
  out.op = form.fused;
  const bool centred = norm && f.step(*norm).op == "layer_norm";
  out.attrs = {{"activation", attr_text(first, "activation")},
               {"centred", int64_t{centred ? 1 : 0}},
               {"eps", norm ? attr_float(f.step(*norm), "eps", 1e-5) : 0.0},
               {"gated", int64_t{members.gate ? 1 : 0}},
               {"trans_b", int64_t{has_rows(first) ? 1 : 0}},
               {"weight_offset", norm ? attr_float(f.step(*norm), "weight_offset", 0.0) : 0.0}};
  if (&form == &kQuantLinear) {
    const auto grouping = grouping_of(first);
    for (size_t i = 0; i < grouping.size(); ++i) out.attrs.emplace(kGroupingNames[i], grouping[i]);
  }
  out.inputs = {norm ? f.step(*norm).inputs[0] : first.inputs[0],
                norm ? f.step(*norm).inputs[1] : Ref{},
                centred && present(f.step(*norm), 2) ? f.step(*norm).inputs[2] : Ref{},
                Ref{}};
  if (members.products.size() == 1 && present(first, form.residual)) out.inputs[3] = first.inputs[form.residual];
  for (size_t p : members.products) {
    const Step& product = f.step(p);
    for (size_t i = 1; i <= form.parts; ++i) out.inputs.push_back(product.inputs[i]);
    out.inputs.push_back(present(product, form.bias) ? product.inputs[form.bias] : Ref{});
    if (!members.gate) out.outputs.push_back(f.step(p).outputs[0]);
  }
  if (members.gate) out.outputs.push_back(f.step(*members.gate).outputs[0]);
  return out;
}

/// One step for these products, at the first of them; false where no kernel does that.
bool fuse_members(Fusion& f, const Members& members, bool with_norm) {
  const size_t at = *std::min_element(members.products.begin(), members.products.end());
  const auto norm = with_norm ? norm_of(f, members, at) : std::nullopt;
  if (with_norm ? !norm : members.products.size() == 1) return false;
  Step step = linears(f, members, norm);
  if (!f.served(step)) return false;
  std::vector<size_t> others;
  for (size_t p : members.products) {
    if (p != at) others.push_back(p);
  }
  if (norm) others.push_back(*norm);
  if (members.gate) others.push_back(*members.gate);
  f.replace(at, std::move(step), others);
  return true;
}

// ---- attention ----------------------------------------------------------------------------------

/// The update by one position of the cache that `cache` is afterwards.
std::optional<size_t> append_of(const Fusion& f, const Ref& cache, size_t s) {
  const auto at = f.last_write(cache, s);
  if (!at) return {};
  const Step& step = f.step(*at);
  const bool fits = step.op == "index_copy" && step.updates && attr_int(step, "axis", 0) == 2 &&
                    same(step.outputs[0], cache) && step.inputs[0].layout.num_elements() == 1 &&
                    step.inputs[1].layout.dims.size() == 4;
  return fits ? at : std::nullopt;
}

/// The rotation by halves that makes `x`, which nothing else reads.
std::optional<size_t> rope_of(const Fusion& f, const Ref& x) {
  const auto made = f.maker(x);
  if (!made || f.reads(x) != 1) return {};
  const Step& step = f.step(*made);
  const bool fits = step.op == "rope" && attr_int(step, "interleaved", 0) == 0 && same(step.outputs[0], x);
  return fits ? made : std::nullopt;
}

/// One table of angles for all heads.
bool same_angles(const Ref& a, const Ref& b) {
  const ir::Layout &x = a.layout, &y = b.layout;
  return a.buffer == b.buffer && a.version == b.version && x.offset == y.offset && x.dims[1] > 0 &&
         (x.dims[1] == 1 || x.strides[1] == 0) && (y.dims[1] == 1 || y.strides[1] == 0) &&
         x.dims[0] == y.dims[0] && x.dims[3] == y.dims[3] && x.strides[3] == y.strides[3] &&
         (x.dims[0] == 1 || x.strides[0] == y.strides[0]);
}

/// `last` of sdpa names the position that is appended: keys behind it are not there yet.
bool ends_at(const Step& attention, const Ref& position) {
  if (!present(attention, 4)) return false;
  const Ref& last = attention.inputs[4];
  return last.buffer == position.buffer && last.version == position.version &&
         last.layout.offset == position.layout.offset;
}

/// The rotations of q and of the new key by the same angles; none where these are used as they are.
struct Turns {
  std::optional<size_t> q, k;
};
Turns turns_of(const Fusion& f, const Ref& q, const Ref& k) {
  const auto rope_q = rope_of(f, q), rope_k = rope_of(f, k);
  if (!rope_q || !rope_k) return {};
  const Step &turn_q = f.step(*rope_q), &turn_k = f.step(*rope_k);
  const bool alike = same_angles(turn_q.inputs[1], turn_k.inputs[1]) &&
                     same_angles(turn_q.inputs[2], turn_k.inputs[2]);
  return alike ? Turns{rope_q, rope_k} : Turns{};
}

/// What an attention and the updates of its caches become.
struct Appending {
  size_t keys, values;  // the updates
  Turns turns;
  bool ends = false;
};

/// The updates, and the rotations, move down to the attention: nobody may read the caches, or write what
/// they read.
bool may_move(const Fusion& f, size_t s, const Appending& a, const Step& out) {
  const Step& attention = f.step(s);
  size_t from = std::min(a.keys, a.values);
  if (a.turns.q) from = std::min({from, *a.turns.q, *a.turns.k});
  for (size_t i = 0; i < 6; ++i) {
    if (out.inputs[i].present() && !f.keeps(out.inputs[i], from, s)) return false;
  }
  const Ref &k = attention.inputs[1], &v = attention.inputs[2];
  for (size_t t = from; t < s; ++t) {
    if (f.gone(t)) continue;
    for (const Ref& r : f.step(t).inputs) {
      if (r.present() && (r.buffer == k.buffer || r.buffer == v.buffer)) return false;
    }
  }
  return true;
}

Step appending(const Fusion& f, size_t s, const Appending& a) {
  const Step &attention = f.step(s), &put_k = f.step(a.keys), &put_v = f.step(a.values);
  const Ref &k = attention.inputs[1], &v = attention.inputs[2];
  Step out;
  out.op = "append_sdpa";
  const bool stable = f.stable(k, a.keys) && f.stable(v, a.values);
  out.attrs = {{"ends", int64_t{a.ends ? 1 : 0}},
               {"scale", attr_float(attention, "scale", 1.0)},
               {"stable", int64_t{stable ? 1 : 0}}};
  const Ref mask = present(attention, 3) ? attention.inputs[3] : Ref{};
  if (a.turns.q) {
    const Step &turn_q = f.step(*a.turns.q), &turn_k = f.step(*a.turns.k);
    out.inputs = {turn_q.inputs[0], turn_k.inputs[0], put_v.inputs[1], turn_q.inputs[1],
                  turn_q.inputs[2], put_k.inputs[0],  mask};
  } else {
    out.inputs = {attention.inputs[0], put_k.inputs[1], put_v.inputs[1], Ref{}, Ref{}, put_k.inputs[0], mask};
  }
  out.outputs = {attention.outputs[0], k, v};
  out.updates = true, out.fresh = 1;
  return out;
}

void fuse_one_attention(Fusion& f, size_t s) {
  const Step& attention = f.step(s);
  const Ref &q = attention.inputs[0], &k = attention.inputs[1], &v = attention.inputs[2];
  if (attr_int(attention, "is_causal", 0) != 0 || q.layout.dims[2] != 1) return;
  if (attention.outputs.size() > 1) return;
  const auto keys = append_of(f, k, s), values = append_of(f, v, s);
  if (!keys || !values || *keys == *values) return;
  const Step &put_k = f.step(*keys), &put_v = f.step(*values);
  if (!same(put_k.inputs[0], put_v.inputs[0])) return;
  const bool ends = ends_at(attention, put_k.inputs[0]);
  if (present(attention, 4) && !ends) return;
  for (const Turns& turns : {turns_of(f, q, put_k.inputs[1]), Turns{}}) {
    const Appending a{*keys, *values, turns, ends};
    Step out = appending(f, s, a);
    if (!may_move(f, s, a, out) || !f.served(out)) continue;
    std::vector<size_t> others{a.keys, a.values};
    if (turns.q) others.insert(others.end(), {*turns.q, *turns.k});
    f.replace(s, std::move(out), others);
    return;
  }
}

}  // namespace

void fuse_products(StepList& list, const Served& served) {
  Fusion f(list, served);
  for (size_t s = 0; s < f.size(); ++s) {
    if (f.gone(s) || !is_row_product(f, f.step(s))) continue;
    for (const Members& members : groups_of(f, s)) {
      if (fuse_members(f, members, true) || fuse_members(f, members, false)) break;
    }
  }
  f.finish();
}

void fuse_attention(StepList& list, const Served& served) {
  Fusion f(list, served);
  for (size_t s = 0; s < f.size(); ++s) {
    if (f.step(s).op == "sdpa" && !f.gone(s)) fuse_one_attention(f, s);
  }
  f.finish();
}

}  // namespace rm::plan
