// One function an operator or a family of operators; axes_of() chooses.
#include "selfcheck/alike_axes.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "ir/type.hpp"
#include "selfcheck/fused.hpp"

namespace rm::selfcheck {
namespace {

using ir::Ints;
using ir::Layout;
using select::Operand;

/// Leading axes of products become rows where every operand allows it: kernels do the same, and
/// tiles lie over the rows of all.
void fold_rows(const std::vector<Operand*>& operands) {
  std::vector<Layout> folded;
  for (const Operand* o : operands) {
    if (!o->present) {
      folded.emplace_back();
      continue;
    }
    const Ints& dims = o->layout.dims;
    int64_t rows = 1;
    for (size_t i = 0; i + 1 < dims.size(); ++i) rows *= dims[i];
    if (o->layout.is_empty()) return;
    auto view = ir::view_reshape(o->layout, {rows, dims.back()});
    if (!view) return;
    folded.push_back(*view);
  }
  for (size_t i = 0; i < operands.size(); ++i) operands[i]->layout = folded[i];
}

bool present(const std::vector<Operand>& list, size_t i) {
  return i < list.size() && list[i].present;
}

/// Every operand's axes from the left are those of the first, however many it has.
Axes by_position(const Shape& s) {
  Axes a;
  const Ints& dims = s.outputs[0].layout.dims.size() >= s.inputs[0].layout.dims.size()
                         ? s.outputs[0].layout.dims
                         : s.inputs[0].layout.dims;
  for (size_t d = 0; d < dims.size(); ++d) a.add(dims[d], 0, d + 1 == dims.size());
  for (const auto* list : {&s.inputs, &s.outputs}) {
    for (const Operand& o : *list) {
      std::vector<int> own;
      for (size_t d = 0; o.present && d < o.layout.dims.size(); ++d) {
        const int64_t size = o.layout.dims[d];
        const bool same = d < dims.size() && size == dims[d];
        own.push_back(same ? static_cast<int>(d) : a.add(size, 0, false, size == 1));
      }
      a.of.push_back(std::move(own));
    }
  }
  return a;
}

Axes gemm_axes(Shape& s) {
  if (s.inputs[1].layout.dims.size() == 2) {
    std::vector<Operand*> rows{&s.inputs[0], &s.outputs[0]};
    if (present(s.inputs, 3)) rows.push_back(&s.inputs[3]);
    fold_rows(rows);
  }
  Axes a;
  const Ints &x = s.inputs[0].layout.dims, &w = s.inputs[1].layout.dims;
  std::vector<int> lead;
  for (size_t i = 0; i + 2 < x.size(); ++i) lead.push_back(a.add(x[i], '*'));
  const int m = a.add(x[x.size() - 2], 'M'), k = a.add(x.back(), 'K', true);
  const int n = a.add(s.outputs[0].layout.dims.back(), 'N', true);
  auto with = [&](bool leads, int first, int second) {
    std::vector<int> out = leads ? lead : std::vector<int>{};
    out.push_back(first);
    out.push_back(second);
    return out;
  };
  const bool rows = attr_or<int64_t>(s, "trans_b", 0) != 0;
  a.of.push_back(with(true, m, k));
  a.of.push_back(with(w.size() > 2, rows ? n : k, rows ? k : n));
  a.of.push_back({n});
  a.of.push_back(with(true, m, n));
  a.of.resize(s.inputs.size());
  a.of.push_back(with(true, m, n));
  return a;
}

/// The matrices are as many as they are; rows of a group may be any.
Axes grouped_gemm_axes(const Shape& s) {
  Axes a;
  const Ints &x = s.inputs[0].layout.dims, &w = s.inputs[1].layout.dims;
  const int m = a.add(x[0], 'M'), k = a.add(x[1], 'K', true), n = a.add(w[2], 'N', true);
  const int e = a.add(w[0], '*');
  a.of = {{m, k}, {e, k, n}, {e}, {m, n}};
  return a;
}

Axes quant_linear_axes(Shape& s) {
  std::vector<Operand*> rows{&s.inputs[0], &s.outputs[0]};
  if (present(s.inputs, 5)) rows.push_back(&s.inputs[5]);
  if (s.inputs[0].layout.dims.size() > 1) fold_rows(rows);
  Axes a;
  const Ints& x = s.inputs[0].layout.dims;
  std::vector<int> lead;
  for (size_t i = 0; i + 1 < x.size(); ++i) lead.push_back(a.add(x[i], i + 2 == x.size() ? 'M' : '*'));
  const int k = a.add(x.back(), 'K', true), n = a.add(s.outputs[0].layout.dims.back(), 'N', true);
  const int p = a.add(s.inputs[1].layout.dims[1], 'P', false, true);
  const bool pairs = attr_or<int64_t>(s, "pairs", 0) != 0;
  const int g = a.add(s.inputs[2].layout.dims[pairs ? 0 : 1], 'g', false, true);
  auto with = [&](int last) {
    std::vector<int> out = lead;
    out.push_back(last);
    return out;
  };
  a.of = {with(k), {n, p}, {n, g}, {n, g}, {n}, with(n)};
  if (pairs) std::swap(a.of[2][0], a.of[2][1]);
  a.of.resize(s.inputs.size());
  a.of.push_back(with(n));
  return a;
}

Axes quantize_axes(const Shape& s) {
  Axes a;
  const int n = a.add(s.inputs[0].layout.dims[0], 'N'), k = a.add(s.inputs[0].layout.dims[1], 'K', true);
  const int p = a.add(s.outputs[0].layout.dims[1], 'P', false, true);
  const bool pairs = attr_or<int64_t>(s, "pairs", 0) != 0;
  const int g = a.add(s.outputs[1].layout.dims[pairs ? 0 : 1], 'g', false, true);
  a.of = {{n, k}, {n, p}, {n, g}};
  if (pairs) std::swap(a.of[2][0], a.of[2][1]);
  if (s.outputs.size() > 2) a.of.push_back({n, g});
  return a;
}

Axes sdpa_axes(const Shape& s) {
  Axes a;
  const Ints &q = s.inputs[0].layout.dims, &k = s.inputs[1].layout.dims;
  const int b = a.add(q[0], '*'), h = a.add(q[1], 'H', false, true), g = a.add(k[1], '*');
  const int rows = a.add(q[2], 'S'), t = a.add(k[2], 'T', true), d = a.add(q[3], 'D', true);
  const int e = a.add(s.outputs[0].layout.dims[3], 'E', true);
  a.of = {{b, h, rows, d}, {b, g, t, d}, {b, g, t, e}, {b, h, rows, t}};
  if (s.inputs.size() > 4) a.of.push_back({a.add(1, 0, false, true)});
  a.of.resize(s.inputs.size());
  a.of.push_back({b, h, rows, e});
  if (s.outputs.size() > 1) a.of.push_back({b, h, rows});
  return a;
}

Axes sdpa_backward_axes(const Shape& s) {
  Axes a;
  const Ints &q = s.inputs[0].layout.dims, &k = s.inputs[1].layout.dims;
  const int b = a.add(q[0], '*'), h = a.add(q[1], 'H', false, true), g = a.add(k[1], '*');
  const int rows = a.add(q[2], 'S'), t = a.add(k[2], 'T', true), d = a.add(q[3], 'D', true);
  const int64_t width = s.inputs[2].layout.dims[3];  // kernels may take the keys' alone
  const int e = width == q[3] ? d : a.add(width, 'E', true), one = a.add(1, 0, false, true);
  a.of = {{b, h, rows, d}, {b, g, t, d},    {b, g, t, e},    {b, h, rows, t},
          {one},           {b, h, rows, e}, {b, h, rows},    {b, h, rows, e},
          {b, h, rows, d}, {b, g, t, d},    {b, g, t, e}};
  return a;
}

Axes append_sdpa_axes(const Shape& s) {
  Axes a;
  const Ints &q = s.inputs[0].layout.dims, &cache = s.outputs[1].layout.dims;
  const int b = a.add(q[0], '*'), h = a.add(q[1], 'H', false, true), g = a.add(cache[1], '*');
  const int one = a.add(1, 0, false, true), t = a.add(cache[2], 'T', true);
  const int d = a.add(q[3], 'D', true, true);
  a.of = {{b, h, one, d}, {b, g, one, d}, {b, g, one, d}, {b, h, one, d}, {b, h, one, d}, {one}, {b, h, one, t}};
  a.of.resize(s.inputs.size());
  a.of.insert(a.of.end(), {{b, h, one, d}, {b, g, t, d}, {b, g, t, d}});
  // Angles may be given for one head.
  for (size_t i : {size_t{3}, size_t{4}}) {
    if (!s.inputs[i].present) continue;
    const Ints& angles = s.inputs[i].layout.dims;
    if (angles[0] != q[0]) a.of[i][0] = one;
    if (angles[1] != q[1]) a.of[i][1] = one;
  }
  if (s.inputs.size() > 6 && s.inputs[6].present) {
    const Ints& mask = s.inputs[6].layout.dims;
    if (mask[0] != q[0]) a.of[6][0] = one;
    if (mask[1] != q[1]) a.of[6][1] = one;
  }
  return a;
}

/// The rows of x stay as many as they are; an axis of rows for each weight.
Axes linears_axes(Shape& s) {
  std::vector<Operand*> rows{&s.inputs[0], &s.inputs[LinearsPlaces::kResidual]};
  for (Operand& o : s.outputs) rows.push_back(&o);
  fold_rows(rows);
  Axes a;
  const LinearsPlaces places(s.op);
  const Ints& x = s.inputs[0].layout.dims;
  const int one = a.add(x.size() == 2 ? x[0] : 1, 0, false, true), k = a.add(x.back(), 'K', true);
  int p = 0, g = 0;  // of quantised weights
  if (places.is_quantised()) {
    p = a.add(s.inputs[places.weight(0)].layout.dims[1], 'P', false, true);
    g = a.add(s.inputs[places.weight(0) + 1].layout.dims[0], 'g', false, true);
  }
  a.of = {{one, k}, {k}, {k}, {}};
  std::vector<int> n;
  for (size_t i = 0; places.weight(i) < s.inputs.size(); ++i) {
    const bool rows = attr_or<int64_t>(s, "trans_b", 1) != 0;
    const int64_t size = s.inputs[places.weight(i)].layout.dims[rows ? 0 : 1];
    // Gated products have one size.
    const bool again = !n.empty() && s.outputs.size() == 1;
    n.push_back(again ? n.front() : a.add(size, 'N', true));
    if (places.is_quantised()) {
      a.of.insert(a.of.end(), {{n.back(), p}, {g, n.back()}});
    } else {
      a.of.push_back(rows ? std::vector<int>{n.back(), k} : std::vector<int>{k, n.back()});
    }
    a.of.push_back({n.back()});
  }
  a.of[LinearsPlaces::kResidual] = {one, n.front()};
  a.of.resize(s.inputs.size());
  for (size_t i = 0; i < s.outputs.size(); ++i) a.of.push_back({one, n[i]});
  return a;
}

/// Each parameter has axes of its own, which its gradient, states and results share.
Axes adams_axes(const Shape& s) {
  Axes a;
  a.of = {{a.add(s.inputs[0].layout.dims[0], 0, false, true)}, {}};
  std::vector<std::vector<int>> results;
  for (size_t i = 2; i + 3 < s.inputs.size(); i += 4) {
    const Ints& dims = s.inputs[i].layout.dims;
    std::vector<int> own;
    for (size_t d = 0; d < dims.size(); ++d) own.push_back(a.add(dims[d], 0, d + 1 == dims.size()));
    a.of.insert(a.of.end(), 4, own);
    results.insert(results.end(), 3, own);
  }
  a.of.insert(a.of.end(), results.begin(), results.end());
  return a;
}

/// A product of matrices; the program's operands lie along its result.
Axes gemm_ewise_axes(const Shape& s) {
  Axes a;
  const int m = a.add(s.inputs[0].layout.dims[0], 'M'), k = a.add(s.inputs[0].layout.dims[1], 'K', true);
  const int n = a.add(s.outputs[0].layout.dims[1], 'N', true);
  const bool rows = attr_or<int64_t>(s, "trans_b", 1) != 0;
  a.of = {{m, k}, {rows ? n : k, rows ? k : n}};
  while (a.of.size() <= s.inputs.size()) a.of.push_back({m, n});
  return a;
}

/// Each product has axes of its own.
Axes slopes_axes(const Shape& s) {
  Axes a;
  std::vector<std::vector<int>> results;
  for (size_t i = 0; i + 1 < s.inputs.size(); i += 2) {
    const Ints &g = s.inputs[i].layout.dims, &x = s.inputs[i + 1].layout.dims;
    const int m = a.add(g[0], 'M'), n = a.add(g[1], 'N', true), k = a.add(x[1], 'K', true);
    a.of.insert(a.of.end(), {{m, n}, {m, k}});
    results.insert(results.end(), {{n, k}, {n}});
  }
  a.of.insert(a.of.end(), results.begin(), results.end());
  return a;
}

Axes embedding_axes(const Shape& s) {
  Axes a;
  const int v = a.add(s.inputs[0].layout.dims[0], 'V');
  const int n = a.add(s.inputs[0].layout.dims[1], 'N', true);
  std::vector<int> ids;
  for (int64_t size : s.inputs[1].layout.dims) ids.push_back(a.add(size, 0));
  a.of = {{v, n}, ids, ids};
  a.of[2].push_back(n);
  return a;
}

/// gather, scatter, index_copy, index: sizes of the index and of what it points into are one axis
/// where they are equal; axes over which the values of an index run are their own.
Axes lookup_axes(const Shape& s) {
  Axes a;
  const bool copies = s.op == "index_copy";
  const Layout& x = copies ? s.outputs[0].layout : s.inputs[0].layout;
  std::vector<int> whole;
  for (size_t d = 0; d < x.dims.size(); ++d) whole.push_back(a.add(x.dims[d], 0, d + 1 == x.dims.size()));
  if (s.op == "index") {
    const Ints axes = attr_or(s, "axes", Ints{});
    std::vector<int> shared;
    for (int64_t size : s.inputs[1].layout.dims) shared.push_back(a.add(size, 0));
    a.of.push_back(whole);
    for (size_t i = 1; i < s.inputs.size(); ++i) a.of.push_back(shared);
    std::vector<int> out(whole.begin(), whole.begin() + axes.front());
    out.insert(out.end(), shared.begin(), shared.end());
    out.insert(out.end(), whole.begin() + axes.back() + 1, whole.end());
    a.of.push_back(out);
    return a;
  }
  const auto rank = static_cast<int64_t>(x.dims.size());
  const auto axis = static_cast<size_t>(attr_or<int64_t>(s, "axis", rank - 1));
  const Ints& index = s.inputs[1].layout.dims;  // of index_copy: the source
  std::vector<int> pointed;
  for (size_t d = 0; d < index.size(); ++d) {
    const bool same = d != axis && index[d] == x.dims[d];
    // An index may be shorter than what it points into, and must stay so.
    if (d != axis && !same) a.all[d].fixed = true;
    pointed.push_back(same ? whole[d] : a.add(index[d], 0, d + 1 == index.size(), d != axis));
  }
  if (copies) {
    a.of = {{pointed[axis]}, pointed, whole};
  } else if (s.op == "scatter") {
    a.of = {whole, pointed, pointed, whole};
  } else {
    a.of = {whole, pointed, pointed};
  }
  return a;
}

/// Axes that every operand steps through evenly become one, as kernels have them.
void merge_axes(Shape& s) {
  std::vector<Operand*> all;
  for (auto* list : {&s.inputs, &s.outputs}) {
    for (Operand& o : *list) all.push_back(&o);
  }
  const size_t rank = s.outputs[0].layout.dims.size();
  for (const Operand* o : all) {
    if (!o->present || o->layout.dims != s.outputs[0].layout.dims) return;
  }
  for (size_t d = rank; d-- > 1;) {
    const bool even = std::all_of(all.begin(), all.end(), [&](const Operand* o) {
      const Layout& l = o->layout;
      return l.strides[d - 1] == l.strides[d] * l.dims[d];
    });
    if (!even) continue;
    for (Operand* o : all) {
      Layout& l = o->layout;
      l.dims[d - 1] *= l.dims[d];
      l.strides[d - 1] = l.strides[d];
      l.dims.erase(l.dims.begin() + static_cast<std::ptrdiff_t>(d));
      l.strides.erase(l.strides.begin() + static_cast<std::ptrdiff_t>(d));
    }
  }
}

}  // namespace

Axes axes_of(Shape& s) {
  if (s.op == "gemm") return gemm_axes(s);
  if (s.op == "grouped_gemm") return grouped_gemm_axes(s);
  if (s.op == "quant_linear") return quant_linear_axes(s);
  if (s.op == "quantize") return quantize_axes(s);
  if (s.op == "sdpa") return sdpa_axes(s);
  if (s.op == "sdpa_backward") return sdpa_backward_axes(s);
  if (s.op == "append_sdpa") return append_sdpa_axes(s);
  if (s.op == "linears" || s.op == "quant_linears") return linears_axes(s);
  if (s.op == "adams") return adams_axes(s);
  if (s.op == "gemm_ewise") return gemm_ewise_axes(s);
  if (s.op == "slopes") return slopes_axes(s);
  if (s.op == "embedding") return embedding_axes(s);
  if (s.op == "gather" || s.op == "scatter" || s.op == "index" || s.op == "index_copy") {
    return lookup_axes(s);
  }
  if (s.op == "ewise" || s.op == "copy") merge_axes(s);
  Axes a = by_position(s);
  // The last axis of norms has a letter; the weights lie along it.
  const bool norm = s.op == "layer_norm" || s.op == "rms_norm" || s.op == "layer_norm_backward" ||
                    s.op == "rms_norm_backward";
  if (norm && !a.all.empty()) {
    const int n = a.of[0].back();
    a.all[static_cast<size_t>(n)].letter = 'N';
    for (size_t i = 0; i < a.of.size(); ++i) {
      if (a.of[i].size() == 1) a.of[i][0] = n;
    }
  }
  if (s.op == "adam") a.of[4] = {a.add(s.inputs[4].layout.dims[0], 0, false, true)};
  if (s.op == "softmax") a.all[static_cast<size_t>(a.of[0].back())].letter = 'N';
  return a;
}

}  // namespace rm::selfcheck
