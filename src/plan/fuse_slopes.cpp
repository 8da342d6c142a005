// Small products of training: an element-wise step behind a product becomes part of it, and products of
// transposed operands, as slopes of weights are, run together with sums of those operands' columns.
#include <algorithm>
#include <array>
#include <optional>

#include "plan/fusion.hpp"

namespace rm::plan {
namespace {

constexpr size_t kMostProducts = 12;  // of `slopes`
constexpr size_t kFields = 5;         // of an instruction

/// A product of matrices and nothing else.
bool is_plain_product(const Step& step) {
  return step.op == "gemm" && !step.updates && !present(step, 2) && !present(step, 3) &&
         attr_text(step, "activation") == "none" && attr_float(step, "alpha", 1.0) == 1.0 &&
         step.inputs[0].layout.dims.size() == 2 && step.inputs[1].layout.dims.size() == 2;
}

/// The program with the operand `first` in front of the others.
ir::Ints with_first(const ir::Ints& code, size_t first) {
  ir::Ints out = code;
  for (size_t i = 0; i < out.size(); i += kFields) {
    if (out[i] == 0) continue;  // const: a number of imm
    for (size_t k = i + 2; k < i + kFields; ++k) {
      const int64_t r = out[k], at = static_cast<int64_t>(first);
      if (r >= 0 && r <= at) out[k] = r == at ? 0 : r + 1;
    }
  }
  return out;
}

/// The step with the product of its operand `i` inside; none where that is no such product.
std::optional<size_t> product_of(const Fusion& f, size_t s, size_t i) {
  const Step& step = f.step(s);
  const Ref& x = step.inputs[i];
  const auto made = f.maker(x);
  if (!made || f.reads(x) != 1 || !is_plain_product(f.step(*made))) return {};
  const Step& product = f.step(*made);
  const bool whole = same(product.outputs[0], x) && step.outputs[0].layout.dims == x.layout.dims;
  const bool kept = f.keeps(product.inputs[0], *made, s) && f.keeps(product.inputs[1], *made, s);
  return whole && kept ? made : std::nullopt;
}

void fuse_program(Fusion& f, size_t s) {
  const Step& step = f.step(s);
  for (size_t i = 0; i < step.inputs.size(); ++i) {
    const auto made = product_of(f, s, i);
    if (!made) continue;
    const Step& product = f.step(*made);
    Step out;
    out.op = "gemm_ewise";
    out.attrs = {{"trans_b", attr_int(product, "trans_b", 1)},
                 {"code", with_first(std::get<ir::Ints>(step.attrs.at("code")), i)},
                 {"imm", step.attrs.at("imm")}};
    out.inputs = {product.inputs[0], product.inputs[1]};
    for (size_t k = 0; k < step.inputs.size(); ++k) {
      if (k != i) out.inputs.push_back(step.inputs[k]);
    }
    out.outputs = step.outputs;
    if (!f.served(out)) continue;
    f.replace(s, std::move(out), {*made});
    return;
  }
}

Ref turned(const Ref& r) { return r.with(ir::view_permute(r.layout, {1, 0})); }

/// A product g^T x and, where there is one, the step that sums g's columns.
struct Slope {
  size_t product = 0;
  std::optional<size_t> sum;
  size_t last() const { return std::max(product, sum.value_or(product)); }
};

bool is_slope(const Step& step) {
  if (!is_plain_product(step)) return false;
  const ir::Layout& a = step.inputs[0].layout;
  return a.strides[0] == 1 && a.strides[1] != 1;
}

bool sums_columns(const Step& step, const Ref& g) {
  return step.op == "reduce" && attr_text(step, "kind") == "sum" && same(step.inputs[0], g) &&
         std::get<ir::Ints>(step.attrs.at("axes")) == ir::Ints{0} &&
         step.outputs[0].layout.is_contiguous();
}

Step together(const StepList& list, const std::vector<Slope>& members) {
  Step out;
  out.op = "slopes";
  for (const Slope& m : members) {
    const Step& product = list.steps[m.product];
    const Ref& x = product.inputs[1];
    out.inputs.push_back(turned(product.inputs[0]));
    out.inputs.push_back(attr_int(product, "trans_b", 1) != 0 ? turned(x) : x);
    out.outputs.push_back(product.outputs[0]);
    Ref sum;
    if (m.sum) {
      sum = list.steps[*m.sum].outputs[0];
      sum = sum.with(*ir::view_reshape(sum.layout, {sum.layout.dims[1]}));
    }
    out.outputs.push_back(std::move(sum));
  }
  return out;
}

/// What of the list may be part of such a step, in its order.
std::vector<Slope> slopes_of(const StepList& list, const Served& served) {
  std::vector<Slope> out;
  std::vector<char> taken(list.steps.size(), 0);
  for (size_t s = 0; s < list.steps.size(); ++s) {
    if (!is_slope(list.steps[s])) continue;
    Slope slope{s, {}};
    const Ref g = turned(list.steps[s].inputs[0]);
    for (size_t r = 0; r < list.steps.size() && !slope.sum; ++r) {
      if (taken[r] == 0 && sums_columns(list.steps[r], g)) slope.sum = r;
    }
    const size_t to = slope.last();
    const bool apart = moves(list, s, to) && (!slope.sum || moves(list, *slope.sum, to));
    if (!apart) slope.sum.reset();
    if (!served(list.buffers, together(list, {slope}))) continue;
    if (slope.sum) taken[*slope.sum] = 1;
    out.push_back(slope);
  }
  return out;
}

}  // namespace

void fuse_programs(StepList& list, const Served& served) {
  Fusion f(list, served);
  for (size_t s = 0; s < f.size(); ++s) {
    if (!f.gone(s) && f.step(s).op == "ewise" && !f.step(s).updates) fuse_program(f, s);
  }
  f.finish();
}

void fuse_slopes(StepList& list, const Served& served) {
  std::vector<Slope> left = slopes_of(list, served);
  std::vector<char> gone(list.steps.size(), 0);
  while (!left.empty()) {
    // The last ones that one step can take; where they cannot move together, some are tried again.
    const size_t first = left.size() - std::min(left.size(), kMostProducts);
    size_t to = 0;
    for (size_t i = first; i < left.size(); ++i) to = std::max(to, left[i].last());
    std::vector<Slope> members, rest;
    for (size_t i = 0; i < left.size(); ++i) {
      const Slope& m = left[i];
      const bool joins = i >= first && moves(list, m.product, to) && (!m.sum || moves(list, *m.sum, to));
      (joins ? members : rest).push_back(m);
    }
    left = std::move(rest);
    if (members.size() == 1 && !members[0].sum) continue;
    Step step = together(list, members);
    if (!served(list.buffers, step)) continue;
    for (const Slope& m : members) {
      gone[m.product] = 1;
      if (m.sum) gone[*m.sum] = 1;
    }
    list.steps[to] = std::move(step);
    gone[to] = 0;
  }
  std::vector<Step> kept;
  for (size_t s = 0; s < list.steps.size(); ++s) {
    if (gone[s] == 0) kept.push_back(std::move(list.steps[s]));
  }
  list.steps = std::move(kept);
}

}  // namespace rm::plan
